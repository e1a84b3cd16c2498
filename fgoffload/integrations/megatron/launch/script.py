"""Separates our flags from a script's own arguments, and applies offload before the script starts."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

import torch

from fgoffload.config import AUTO, OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron import MegatronOffload, apply
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.integrations.megatron.flags.tag_checks import check_tags
from fgoffload.integrations.megatron.interface import get_version
from fgoffload.integrations.megatron.launch.call_sites import (
    SWITCH,
    CallSites,
    MegatronParser,
    find_call_sites,
    find_megatron_parser,
)
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import CPU_OFFLOAD_V1, load_module
from fgoffload.units import parse_bytes

_BUDGET = "--offload-memory-budget"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """Offload settings from a script's command line."""

    offload: OffloadConfig | None
    """Settings of offload; None if it is off."""
    script_words: tuple[str, ...]
    """Words without our flags and their values, in order."""
    remarks: tuple[str, ...] = ()
    """Sentences about our flags that have no effect."""
    trainer_budget: str | int | None = None
    """Memory budget for a script that creates trainers, if Megatron's offload is off: `auto`, or bytes."""


def take_own_flags(words: Sequence[str]) -> OwnFlags:
    """Split `words` into our flags and the script's words.

    A `--` and all words after it belong to the script.

    Raises:
        ConfigError: One of our flags has an invalid value.
    """
    end = list(words).index("--") if "--" in words else len(words)
    parser = FlagParser(source=COMMAND_LINE)
    add_fine_grained_offload_args(parser)
    values, rest = parser.parse_known_args(list(words[:end]))
    try:
        offload = OffloadConfig.from_flags(values)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {error}") from error
    budget = None if offload is not None else getattr(values, "offload_memory_budget", None)
    return OwnFlags(
        offload=offload,
        trainer_budget=budget if budget in (None, AUTO) else _read_budget(budget),
        script_words=(*rest, *words[end:]),
        remarks=tuple(
            _find_remarks(offload, {word.partition("=")[0] for word in words[:end]} & set(parser.find_given(words[:end])))
        ),
    )


def _read_budget(text: str) -> int:
    budget_bytes = parse_bytes(text, name=f"{COMMAND_LINE}: {_BUDGET}", needs_unit=True)
    if budget_bytes <= 0:
        raise ConfigError(f"{COMMAND_LINE}: {_BUDGET} {text} leaves no GPU memory. Give a size like 60GiB.")
    return budget_bytes


def _find_remarks(offload: OffloadConfig | None, given: set[str]) -> Iterator[str]:
    """Yield a sentence for each of the flags `given` that has no effect, with the reason."""
    is_switched = any(flag.endswith(SWITCH[2:]) for flag in given)
    if offload is None and given - {_BUDGET} and not is_switched:
        yield f"{' '.join(sorted(given - {_BUDGET}))} has no effect without {SWITCH}. Add {SWITCH}."
    if offload is not None and offload.activation_offload_fraction == 0:
        yield "--activation-offload-fraction 0 keeps all sites on the GPU. Give a fraction above 0."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOffload:
    """Offload that is applied for a script. Made by `apply_to_script`."""

    offload: MegatronOffload
    """The integration. Call its `remove` when the script has ended."""
    call_sites: CallSites
    """State of Megatron's own call sites."""
    words: tuple[str, ...]
    """Arguments that the script gets."""

    def describe(self) -> str:
        """Return sentences that say how Megatron's own call sites are switched on, and where Megatron-Core is."""
        core = load_module("megatron.core")
        return f"{self.call_sites} Megatron-Core {get_version()} is in {Path(core.__file__).parent}."


def apply_to_script(
    config: OffloadConfig, script_words: Sequence[str], environment: MutableMapping[str, str] = os.environ
) -> ScriptOffload:
    """Apply offload for a script that starts afterwards in this process.

    The script's folder must already be first in `sys.path`, so that offload is applied to a Megatron-LM in that folder.

    Args:
        config: Settings of offload; see `take_own_flags`.
        script_words: Arguments that the script gets, without our flags.
        environment: Environment of this process. `LOCAL_RANK` selects its GPU. `NVTE_CPU_OFFLOAD_V1` is set if Megatron-LM
            requires it, after Transformer Engine has read it, so that Transformer Engine runs as without offload.

    Raises:
        ConfigError: A tag conflicts with a flag of the script.
        IntegrationError: Megatron-Core is missing, lacks a symbol, or offload is applied already.
        PlanError: The plan file cannot be read.
    """
    _choose_gpu(environment)
    with contextlib.ExitStack() as undo:
        offload = apply(config)
        undo.callback(offload.remove)
        parser = find_megatron_parser()
        _check_tags(config, parser, script_words)
        call_sites = find_call_sites(offload.selected, config.min_offloaded_tensor_size, parser, script_words, environment)
        if call_sites.flags:
            environment.setdefault(CPU_OFFLOAD_V1, "1")
        undo.pop_all()
    return ScriptOffload(offload=offload, call_sites=call_sites, words=(*call_sites.flags, *script_words))


def _choose_gpu(environment: Mapping[str, str]) -> None:
    """Select the GPU that Megatron-LM will select later, since the engine's streams and memory belong to one GPU."""
    local_rank = environment.get("LOCAL_RANK", "0")
    # If each process sees only its own GPU, that GPU is selected already.
    if not needs_cpu_support() and local_rank.isdigit() and int(local_rank) < torch.cuda.device_count():
        torch.cuda.set_device(int(local_rank))


def _check_tags(offload: OffloadConfig, parser: MegatronParser | None, script_words: Sequence[str]) -> None:
    found = None if parser is None else parser.find_values(script_words)
    if found is None:
        return
    values = dict(vars(found))
    if values.get("yaml_cfg"):
        return  # Megatron-LM reads all values from that file
    if "num_experts" in values:  # name of the flag, which differs from the field
        values["num_moe_experts"] = values["num_experts"]
    try:
        check_tags(offload, values)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {error}") from error
