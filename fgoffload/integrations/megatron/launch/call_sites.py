"""Decides whether a script gets Megatron's own offload flags.

Megatron's layers read from their `TransformerConfig` which of their call sites are on, and `apply` sets that in every config.
So offload works without flags of the script. The script still gets the flags that it accepts: then its log and its checkpoints
show that they were on, and it binds its processes to the CPUs of their GPUs. Megatron-LM rejects them in settings that our
engine supports, and some versions do not have them. In these cases only the config is set.
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence

from fgoffload.integrations.megatron.adapter.model_config import list_accepted
from fgoffload.integrations.megatron.launch.megatron_parser import MegatronParser
from fgoffload.integrations.megatron.launch.own_flags import SWITCH
from fgoffload.integrations.megatron.patching.imports import CPU_OFFLOAD_V1, load_module

_LIST, _SIZE = "--offload-modules", "--min-offloaded-tensor-size"


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
            return "Megatron's own call sites stay off: it has none of these tags."
        by = "flags" if self.flags else f"config, and the script does not get its flags, {self.reason}"
        return f"Megatron's own call sites for {' '.join(self.tags)} are on by its {by}."


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
        script_words: Words that the script gets, without our flags.
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
        yield "since its parser cannot be asked for them"
        return
    for flag in (SWITCH, _LIST):
        if not parser.knows(flag):
            yield f"since its parser does not know {flag}"
    values = parser.find_values(script_words) or argparse.Namespace()
    implementation = getattr(values, "transformer_impl", "transformer_engine")
    if implementation != "transformer_engine":
        yield f"since it refuses them with --transformer-impl {implementation}"
    given = environment.get(CPU_OFFLOAD_V1)
    if given is not None and given != "1":
        yield f"since it refuses them with {CPU_OFFLOAD_V1}={given}"
    # With its flag on, Megatron-LM's training binds the process to the CPUs of its GPU, and exits if it cannot.
    if hasattr(load_module("megatron.core.pipeline_parallel.utils"), "set_ideal_affinity_for_current_gpu"):
        if not has_module("pynvml"):
            yield "since it would then need pynvml, to bind itself to CPUs (pip install nvidia-ml-py)"
        if not (has_module("cuda.bindings") or has_module("cuda.cudart")):
            yield "since it would then need cuda.bindings, to bind itself to CPUs (pip install cuda-bindings)"
