"""Separates our flags from a script's own arguments, and applies offload before the script starts."""

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fgoffload.config import AUTO, OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron import MegatronOffload, apply
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.integrations.megatron.flags.tag_checks import check_tags
from fgoffload.integrations.megatron.interface import get_version
from fgoffload.integrations.megatron.launch.megatron_parser import read_megatron_flags
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.units import parse_bytes

_SWITCH = "--fine-grained-activation-offloading"
_BUDGET = "--offload-memory-budget"
_MODULES = "--offload-modules"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """Offload settings from a script's command line."""

    offload: OffloadConfig | None
    """Offload settings; None if offload is off."""
    script_words: tuple[str, ...]
    """Arguments for the script: all words except our flags and their values, in order."""
    remarks: tuple[str, ...] = ()
    """Warnings about offload flags that have no effect."""
    trainer_budget: str | int | None = None
    """Memory budget for a script that creates a transformers Trainer, if Megatron's offload is off: `auto` or bytes."""


def take_own_flags(words: Sequence[str], *, makes_trainers: bool = False, script_text: str = "") -> OwnFlags:
    """Split `words` into our flags and the script's words.

    A `--` and all words after it belong to the script. `makes_trainers` is true if the script creates a Trainer. Flags that
    occur in `script_text`, the script's source, are never reported as misspelled.

    Raises:
        ConfigError: One of our flags is misspelled or has an invalid value.
    """
    end = list(words).index("--") if "--" in words else len(words)
    parser = FlagParser(source=COMMAND_LINE)
    add_fine_grained_offload_args(parser)
    values, rest = parser.parse_known_args(list(words[:end]))
    _check_spelling(rest, parser, script_text)
    offload = OffloadConfig.from_flags(values)
    budget = None if offload is not None else getattr(values, "offload_memory_budget", None)
    given = {word.partition("=")[0] for word in words[:end]} & set(parser.find_given(words[:end]))
    return OwnFlags(
        offload=offload,
        trainer_budget=budget if budget in (None, AUTO) else _read_budget(budget),
        script_words=(*rest, *words[end:]),
        remarks=tuple(_list_remarks(offload, given, makes_trainers=makes_trainers)),
    )


def _read_budget(text: str) -> int:
    budget_bytes = parse_bytes(text, name=_BUDGET, needs_unit=True)
    if budget_bytes <= 0:
        raise ConfigError(f"{_BUDGET} {text} leaves no GPU memory. Use a size, for example 60GiB.")
    return budget_bytes


def _check_spelling(script_words: Sequence[str], parser: FlagParser, script_text: str) -> None:
    """Reject words that closely resemble one of our flags, unless `script_text` contains them."""
    for flag in (word.partition("=")[0] for word in script_words):
        near = parser.find_nearest(flag) or ""
        is_close = difflib.SequenceMatcher(None, near, flag).ratio() >= 0.9  # about two wrong letters
        if is_close and near.startswith(("--offload", "--fine-grained")) and flag.strip("-") not in script_text:
            raise ConfigError(f"{flag} is not a flag of fgoffload or of the script. Did you mean {near}?")


def _list_remarks(offload: OffloadConfig | None, given: set[str], *, makes_trainers: bool) -> Iterator[str]:
    is_switched = any(flag.endswith(_SWITCH[2:]) for flag in given)
    if offload is None and given - {_BUDGET} and not is_switched:
        flags = sorted(given - {_BUDGET})
        ignored = f"{' '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect"
        if makes_trainers:
            arguments = ["['model.layers.*']"] if _MODULES in given else []
            arguments += ["config=TransferConfig(...)"] if given - {_BUDGET, _MODULES} else []
            yield f"{ignored} on a Trainer. In the script, pass OffloadCallback({', '.join(arguments)}) to the Trainer."
        else:
            yield f"{ignored} without {_SWITCH}. Add {_SWITCH}."
    if offload is not None and offload.activation_offload_fraction == 0:
        yield "--activation-offload-fraction 0 keeps all sites on the GPU. Use a fraction above 0."


def apply_to_script(
    config: OffloadConfig, script_words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> MegatronOffload:
    """Apply offload before a script starts in this process. Call `remove` on the result when the script has ended.

    The script's folder must already be first in `sys.path`, so that a Megatron-LM in that folder is found.

    Args:
        config: Offload settings, see `take_own_flags`.
        script_words: Arguments for the script, without our flags.
        environment: Environment variables. `LOCAL_RANK` selects this process's GPU.

    Raises:
        ConfigError: A tag conflicts with one of the script's flags.
        IntegrationError: Megatron-Core is missing or lacks a symbol, or offload is already applied.
        PlanError: The plan file cannot be read.
    """
    _choose_gpu(environment)
    with contextlib.ExitStack() as undo:
        offload = apply(config)
        undo.callback(offload.remove)
        _check_tags(config, read_megatron_flags(script_words))
        undo.pop_all()
    return offload


def describe_megatron() -> str:
    """Return a sentence that names the version and the folder of the imported Megatron-Core."""
    return f"Megatron-Core {get_version()} is in {Path(load_module('megatron.core').__file__).parent}."


def _choose_gpu(environment: Mapping[str, str]) -> None:
    """Select the GPU that Megatron-LM will select later: the engine creates its streams and buffers on the current GPU."""
    local_rank = environment.get("LOCAL_RANK", "0")
    # If each process sees only its own GPU, that GPU is already selected.
    if not needs_cpu_support() and local_rank.isdigit() and int(local_rank) < torch.cuda.device_count():
        torch.cuda.set_device(int(local_rank))


def _check_tags(offload: OffloadConfig, values: dict[str, Any] | None) -> None:
    if values is None or values.get("yaml_cfg"):
        return  # the values are unknown, or a YAML file sets them
    if "num_experts" in values:  # the flag and the field have different names
        values["num_moe_experts"] = values["num_experts"]
    check_tags(offload, values)
