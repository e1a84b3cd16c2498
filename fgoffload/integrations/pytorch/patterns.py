"""Selects the modules that are regions by globs over their names, and gives each a tag and a layer.

[Note: Globs]
A pattern matches a module's name part by part. Dots separate parts. `*`, `?` and `[...]` work as in a shell
within one part. `**` matches any number of parts, including none. So `layers.*.attn` matches `layers.0.attn` but not
`layers.0.cross.attn`, and `**.attn` matches both. The model itself has no name and is never a region: its tensors would be
offloaded at the end of forward, just before backward needs them.

`torch.compile`, checkpoint wrappers, data parallelism and PEFT add parts to names. These parts are ignored. A wrapper then has
the name of its module, and the wrapper is the region.
"""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from fgoffload.errors import ConfigError

Patterns: TypeAlias = "Mapping[str, str] | Iterable[str] | str"
"""Globs with tags, or globs alone, whose tags come from the module names."""

_WIDE_RANGE = re.compile(r"\[[^\]]*(\d\d+-|-\d\d+)[^\]]*\]")
"""A range in brackets that is meant for numbers of two digits."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attribute names of the wrapped module in `torch.compile`, torch's checkpoint wrapper and FSDP1."""

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Containers without a forward. A region around one would do nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSite:
    """Module that is a region."""

    module: torch.nn.Module
    name: str
    """Name as in `layers.3.attn`, without the parts that wrappers add."""
    tag: str
    layer: int
    """First number in the name, or 0."""
    is_checkpointed: bool = False
    """Whether the region recomputes the module in backward and saves only its inputs."""


def find_sites(model: torch.nn.Module, patterns: Patterns) -> list[ModuleSite]:
    """Return the modules of `model` that match `patterns`, in the model's order. See [Note: Globs].

    Without tags, a module's tag is the last part of its name that is a word, such as `attn` for `layers.3.attn` and `mlp` for
    `mlp.0`. If no part is a word, the tag is the name of its class.

    Raises:
        ConfigError: `model` is not a module, a pattern is not text or matches no module, two patterns give a module different
            tags, or a tag is not one word.
    """
    check_model(model)
    tags = _read_patterns(patterns)
    modules = dict(name_modules(model))
    found = {name: [pattern for pattern in tags if _matches(pattern, name)] for name in modules}
    for pattern in tags:
        if not any(pattern in matching for matching in found.values()):
            raise ConfigError(_say_no_match(pattern, model, list(modules)))
    return [make_site(modules[name], name, {p: tags[p] for p in matching}) for name, matching in found.items() if matching]


def check_model(model: object) -> None:
    """Raise `ConfigError` unless `model` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model {model!r} is not a torch.nn.Module. Give the model itself.")


def check_tag(tag: object) -> None:
    """Raise `ConfigError` unless `tag` is one word."""
    if not isinstance(tag, str) or not tag.isidentifier():
        raise ConfigError(f"tag {tag!r} is not one word. Use letters, digits and underscores, as in 'core_attn'.")


def _read_patterns(patterns: Patterns) -> dict[str, str | None]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Iterable):
        raise ConfigError(
            f"modules {patterns!r} are not patterns. Give globs, as in ['layers.*.mlp'], or a dict with their tags."
        )
    tags = dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    for pattern, tag in tags.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"pattern {pattern!r} is not text. Give a glob over module names, as in 'layers.*.mlp'.")
        if (wide := _WIDE_RANGE.search(pattern)) is not None:
            raise ConfigError(
                f"pattern {pattern!r}: {wide[0]} matches one character, not a range of numbers. Give a pattern for each number "
                "of digits, as in 'layers.[0-9]' and 'layers.1[0-5]'."
            )
        if isinstance(patterns, Mapping):
            check_tag(tag)
    return tags


def name_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every possible region once, with its name without the parts of wrappers."""
    outer = _find_outer_parts(model)
    names: set[str] = {""}
    modules: set[int] = {id(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in path.split(".") if part not in _WRAPPER_PARTS]
        name = ".".join(parts[len(outer) :] if parts[: len(outer)] == outer[: len(parts)] else parts)
        if name not in names and id(module) not in modules and not isinstance(module, _CONTAINERS):
            names.add(name)
            modules.add(id(module))
            yield name, module


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside `torch.compile`, torch's checkpoint wrapper and FSDP1."""
    while (inner := _find_wrapped(module)) is not None:
        module = inner
    return module


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DDP, FSDP1 and `torch.compile`."""
    model = unwrap(model)
    return unwrap_model(model.get_submodule("module")) if _is_data_parallel(model) else model


def _is_data_parallel(model: torch.nn.Module) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


def _find_wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    children = dict(module.named_children())
    return next((children[part] for part in _WRAPPER_PARTS if part in children), None)


def _find_outer_parts(model: torch.nn.Module) -> list[str]:
    """Return the name parts that DDP and PEFT prepend."""
    parts = ["module"] if _is_data_parallel(unwrap(model)) else []
    inner = unwrap_model(model)
    # A PEFT model holds its tuner, which holds the model. Prompt methods have no tuner. A transformers model with its own
    # adapters has `peft_config` too, but its `model` is a part of the model.
    for part in ("base_model", "model"):
        if not (hasattr(inner, "peft_config") and part in dict(inner.named_children())):
            break
        parts.append(part)
        inner = inner.get_submodule(part)
    return parts


def _matches(pattern: str, name: str) -> bool:
    return _match_parts(pattern.split("."), name.split("."))


def _match_parts(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_parts(pattern[1:], name[index:]) for index in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _match_parts(pattern[1:], name[1:])


def make_site(module: torch.nn.Module, name: str, tags: Mapping[str, str | None]) -> ModuleSite:
    """Return the region around `module`, whose `name` is without the parts of wrappers.

    `tags` has a tag by matching pattern. None takes the last word of the name. Raises `ConfigError` if two tags differ.
    """
    parts = name.split(".")
    words = [part for part in parts if part.isidentifier()]
    default = words[-1] if words else type(module).__name__
    chosen = {pattern: tag or default for pattern, tag in tags.items()}
    if len(set(chosen.values())) > 1:
        given = " and ".join(f"{tag!r} by {pattern!r}" for pattern, tag in chosen.items())
        raise ConfigError(f"module {name!r} is given two tags, {given}. Make the patterns exclude each other.")
    layer = next((int(part) for part in parts if part.isdecimal()), 0)
    return ModuleSite(module, name, next(iter(chosen.values())), layer)


def _say_no_match(pattern: str, model: torch.nn.Module, names: list[str]) -> str:
    near = _list_near(pattern, names)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"pattern {pattern!r} matches none of the {len(names)} modules in {type(model).__name__} that have a forward.{hint} "
        "Names are as in `named_modules()`; * stays within one part of a name, ** crosses dots."
    )


def _list_near(pattern: str, names: list[str]) -> list[str]:
    """Return matching patterns close to `pattern`: the same pattern at any depth, or the nearest spellings."""
    deeper = f"**.{pattern}"
    if any(_matches(deeper, name) for name in names):
        return [deeper]
    general = [".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names]
    ends = [f"**.{name.rsplit('.', 1)[-1]}" for name in general]
    candidates = list(dict.fromkeys([*general, *names, *ends]))
    return difflib.get_close_matches(pattern, [name for name in candidates if name != "*"], n=2, cutoff=0.5)
