"""Selects modules to become regions, by globs over their names. Each region has a tag and a layer number.

[Note: Globs]
A pattern matches a module's name part by part, where dots separate the parts. `*`, `?` and `[...]` work within one part, as in
a shell. `**` matches any number of parts, including none. So `layers.*.attn` matches `layers.0.attn` but not
`layers.0.cross.attn`, and `**.attn` matches both. The model itself is never a region: its tensors would be offloaded at the end
of forward, just before backward needs them.

`torch.compile`, checkpoint wrappers, data parallelism and PEFT add parts to names. Patterns ignore these parts. A pattern that
matches the name of a wrapped module selects its wrapper as the region.
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
"""Globs, or a mapping from globs to tags. By default, a tag is a word of the module's name."""

_WIDE_RANGE = re.compile(r"\[[^\]]*(\d\d+-|-\d\d+)[^\]]*\]")
"""Matches a bracket range such as `[0-15]`, which looks like a range of numbers but is a set of characters."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attribute names of the wrapped module in `torch.compile`, torch's checkpoint wrapper and FSDP1."""

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Containers without a forward, which cannot be regions."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSite:
    """Module whose forward runs as a region."""

    module: torch.nn.Module
    name: str
    """Name such as `layers.3.attn`, without the parts that wrappers add."""
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
        ConfigError: A pattern is not a string or matches no module, a tag is not an identifier, or a module has two tags.
    """
    tags = read_patterns(patterns)
    modules = dict(name_modules(model))
    found = {name: [pattern for pattern in tags if _match_parts(pattern.split("."), name.split("."))] for name in modules}
    for pattern in tags:
        if not any(pattern in matching for matching in found.values()):
            near = _find_near(pattern, list(modules))
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(
                f"pattern {pattern!r} matches none of the {len(modules)} modules in {type(model).__name__} that have a forward."
                f"{hint} Use names from `named_modules()`; * matches within one part of a name, and ** also matches dots."
            )
    return [make_site(modules[name], name, {p: tags[p] for p in matching}) for name, matching in found.items() if matching]


def check_model(model: object) -> None:
    """Raise `ConfigError` unless `model` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model {model!r} is not a torch.nn.Module. Pass the model itself.")


def check_tag(tag: object) -> None:
    """Raise `ConfigError` unless `tag` is an identifier."""
    if not isinstance(tag, str) or not tag.isidentifier():
        raise ConfigError(f"tag {tag!r} is not an identifier. Use letters, digits and underscores, for example 'core_attn'.")


def read_patterns(patterns: Patterns) -> dict[str, str | None]:
    """Return a dict from each pattern to its tag, or to None for the default tag. Raise `ConfigError` for invalid patterns."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Iterable):
        raise ConfigError(f"modules {patterns!r} is not a list of globs. Pass one such as ['layers.*'], or a dict with tags.")
    tags = dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    for pattern, tag in tags.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"pattern {pattern!r} is not a string. Pass a glob over module names, such as 'layers.*.mlp'.")
        if (wide := _WIDE_RANGE.search(pattern)) is not None:
            raise ConfigError(
                f"pattern {pattern!r}: {wide[0]} matches one character, not a range of numbers. Use one pattern per number of "
                "digits, for example 'layers.[0-9]' and 'layers.1[0-5]'."
            )
        if isinstance(patterns, Mapping):
            check_tag(tag)
    return tags


def name_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the name and the module of each possible region once. Names omit the parts that wrappers add."""
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
    """Return the module inside the wrappers of `torch.compile`, torch's checkpointing and FSDP1."""
    for name, child in module.named_children():
        if name in _WRAPPER_PARTS:
            return unwrap(child)
    return module


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers of DDP, FSDP1 and `torch.compile`."""
    model = unwrap(model)
    return unwrap_model(model.module) if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _find_outer_parts(model: torch.nn.Module) -> list[str]:
    """Return the parts that DDP and PEFT prepend to module names."""
    parts = ["module"] if isinstance(unwrap(model), torch.nn.parallel.DistributedDataParallel) else []
    inner = unwrap_model(model)
    # A PEFT model contains its tuner, which contains the model. PEFT's prompt methods have no tuner. A transformers model with
    # its own adapters also has `peft_config`, but its `model` is an ordinary submodule.
    for part in ("base_model", "model"):
        if not (hasattr(inner, "peft_config") and part in dict(inner.named_children())):
            break
        parts.append(part)
        inner = inner.get_submodule(part)
    return parts


def _match_parts(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_parts(pattern[1:], name[index:]) for index in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _match_parts(pattern[1:], name[1:])


def make_site(module: torch.nn.Module, name: str, tags: Mapping[str, str | None]) -> ModuleSite:
    """Return the region around `module`. `tags` maps each matching pattern to a tag, or to None for the default."""
    parts = name.split(".")
    words = [part for part in parts if part.isidentifier()]
    default = words[-1] if words else type(module).__name__
    chosen = {pattern: tag or default for pattern, tag in tags.items()}
    if len(set(chosen.values())) > 1:
        described = " and ".join(f"{tag!r} from {pattern!r}" for pattern, tag in chosen.items())
        raise ConfigError(f"module {name!r} has two tags, {described}. Use patterns that do not overlap.")
    layer = next((int(part) for part in parts if part.isdecimal()), 0)
    return ModuleSite(module, name, next(iter(chosen.values())), layer)


def _find_near(pattern: str, names: list[str]) -> list[str]:
    """Return similar patterns that match a module: the pattern's children, the pattern at any depth, or similar spellings."""
    for near in (f"{pattern}.*", f"**.{pattern}", f"**.{pattern}.*"):
        if any(_match_parts(near.split("."), name.split(".")) for name in names):
            return [near]
    general = {".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names}
    numbered = names if any(part.isdecimal() for part in pattern.split(".")) else ()
    return difflib.get_close_matches(pattern, sorted({*general, *numbered} - {"*"}), n=2, cutoff=0.5)
