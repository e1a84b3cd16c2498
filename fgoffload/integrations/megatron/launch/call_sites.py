"""Decides whether a script gets Megatron's own offload flags.

Megatron's layers read from their `TransformerConfig` which of their call sites are on, and `apply` sets that in every config.
So offload works without flags of the script. The script still gets the flags that it accepts: then its log and its checkpoints
show that they were on, and it binds its processes to the CPUs of their GPUs. Megatron-LM rejects them in settings that our
engine supports, and some versions do not have them. In these cases only the config is set.

[Note: Megatron-LM's parser]
Flags differ between versions, so Megatron-LM's own parser is queried. It lies next to scripts, so it is found where the script
would find it. A script without Megatron-LM has a parser of its own, which cannot be queried before the script runs. Since 0.18,
wheels of megatron-core include `megatron.training`. A script need not use it, so the parser of a wheel is not queried.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.adapter.model_config import list_accepted
from fgoffload.integrations.megatron.patching.imports import CPU_OFFLOAD_V1, load_module

SWITCH = "--fine-grained-activation-offloading"
_LIST, _SIZE = "--offload-modules", "--min-offloaded-tensor-size"


_MODULE = "megatron.training.arguments"


class MegatronParser:
    """Megatron-LM's parser, with all flags of its scripts."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def knows(self, flag: str) -> bool:
        """Return whether the parser accepts `flag`."""
        return flag in self._parser._option_string_actions  # noqa: SLF001 - argparse has no public name for it

    def find_values(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the values of all flags, or None if the parser rejects `words`, which the script will report itself."""
        silence = io.StringIO()
        with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            try:
                return self._parser.parse_known_args(list(words))[0]
            # Some of its types raise errors that argparse does not turn into an exit, such as KeyError.
            except (SystemExit, AssertionError, LookupError, TypeError, ValueError):
                return None


class _ParserIsComplete(BaseException):
    """Ends Megatron-LM's `parse_args` before it parses. Not an `Exception`, so that no handler catches it as an error."""


def _is_of_wheel() -> bool:
    """Return whether `megatron.training` is next to the metadata that pip writes for an installed wheel."""
    try:
        spec = importlib.util.find_spec(_MODULE.rpartition(".")[0])
    except (ImportError, ValueError):  # Megatron is missing, or is a module created by hand
        return False
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).parents[1].glob("megatron_core-*.dist-info")) for folder in folders)


def find_megatron_parser() -> MegatronParser | None:
    """Return the parser of the Megatron-LM that the script will import, or None if there is none to query.

    Importing it imports Megatron-LM's training code, as the script will do anyway.
    """
    if _is_of_wheel():
        return None
    try:
        module = load_module(_MODULE)
    except (ImportError, IntegrationError):
        return None  # if the script needs it, the script reports that it is missing
    parse_args: Any = getattr(module, "parse_args", None)
    found: list[argparse.ArgumentParser] = []

    # In every version since 2, Megatron-LM passes the complete parser to the script's `extra_args_provider`, and then parses.
    def take_parser(parser: argparse.ArgumentParser) -> NoReturn:
        found.append(parser)
        raise _ParserIsComplete

    if parse_args is None:
        return None
    with contextlib.suppress(_ParserIsComplete):
        parse_args(extra_args_provider=take_parser)
    return MegatronParser(found[0]) if found else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallSites:
    """How Megatron's own call sites are switched on in a script."""

    tags: tuple[str, ...]
    """Selected tags that Megatron accepts, in order; empty if its call sites stay off."""
    flags: tuple[str, ...] = ()
    """Flags that are put before the script's words; empty if only every TransformerConfig of the script is changed."""
    reason: str = ""
    """Reason for not using the flags."""

    def __str__(self) -> str:
        """Return a sentence for the user who started the script."""
        if not self.tags:
            return "Megatron-Core has no call site of its own for these tags."
        tags = " ".join(self.tags)
        if self.flags:
            return f"The script gets Megatron-LM's own flags for {tags}."
        return (
            f"Megatron-Core's config switches on its call sites for {tags}. The script does not get Megatron-LM's own offload "
            f"flags, because {self.reason}. Offload works without them, and you need not do anything."
        )


def has_module(name: str) -> bool:
    """Return whether a module called `name` could be imported. Imports its parents."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent is missing, or is a module created by hand
        return False


def find_call_sites(
    selected: Sequence[str],
    min_offloaded_numel: int,
    parser: MegatronParser | None,
    script_words: Sequence[str],
    environment: Mapping[str, str],
    *,
    has_module: Callable[[str], bool] = has_module,
) -> CallSites:
    """Return how to switch Megatron's own call sites on.

    Args:
        selected: Tags that may be offloaded.
        min_offloaded_numel: Elements. Smaller storages stay on the GPU.
        parser: Megatron-LM's parser, or None if there is none.
        script_words: Arguments that the script gets, without our flags.
        environment: Environment of the process.
        has_module: Returns whether a module could be imported.
    """
    tags = tuple(list_accepted(selected))
    if not tags:
        return CallSites(tags=())
    reason = next(_find_reasons_against_flags(parser, script_words, environment, has_module), "")
    if reason or parser is None:
        return CallSites(tags=tags, reason=reason)
    size = (_SIZE, str(min_offloaded_numel)) if parser.knows(_SIZE) else ()
    # The switch comes last and ends the list, since the script's words follow.
    return CallSites(tags=tags, flags=(_LIST, *tags, *size, SWITCH))


def _find_reasons_against_flags(
    parser: MegatronParser | None,
    script_words: Sequence[str],
    environment: Mapping[str, str],
    has_module: Callable[[str], bool],
) -> Iterator[str]:
    """Yield the reasons why Megatron-LM would reject its own flags here. None of them affects our engine."""
    if parser is None:
        yield "there is no Megatron-LM next to the script"
        return
    for flag in (SWITCH, _LIST):
        if not parser.knows(flag):
            yield f"its Megatron-LM does not know {flag}"
    values = parser.find_values(script_words) or argparse.Namespace()
    implementation = getattr(values, "transformer_impl", "transformer_engine")
    if implementation != "transformer_engine":
        yield f"Megatron-LM rejects them with --transformer-impl {implementation}"
    given = environment.get(CPU_OFFLOAD_V1)
    if given is not None and given != "1":
        yield f"Megatron-LM rejects them with {CPU_OFFLOAD_V1}={given}"
    # With its flag on, Megatron-LM's training binds the process to the CPUs of its GPU, and exits if it cannot.
    if hasattr(load_module("megatron.core.pipeline_parallel.utils"), "set_ideal_affinity_for_current_gpu"):
        if not has_module("pynvml"):
            yield "Megatron-LM then needs pynvml to bind processes to CPUs (pip install nvidia-ml-py)"
        if not (has_module("cuda.bindings") or has_module("cuda.cudart")):
            yield "Megatron-LM then needs cuda.bindings to bind processes to CPUs (pip install cuda-bindings)"
