"""Our flags, taken out of the words that a script gets."""

import dataclasses
from collections.abc import Iterator, Sequence

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.units import parse_bytes

SWITCH, BUDGET = "--fine-grained-activation-offloading", "--offload-memory-budget"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """What the words of a script say about offload."""

    offload: OffloadConfig | None
    """None where offload is off."""
    script_words: tuple[str, ...]
    """The words without our flags and their values, in order."""
    remarks: tuple[str, ...] = ()
    """Sentences about flags of ours that change nothing."""
    trainer_budget_bytes: int | None = None
    """Memory budget for a script that makes trainers, where offload of Megatron is off."""


def take_own_flags(words: Sequence[str]) -> OwnFlags:
    """Split `words` into our flags and what is the script's.

    What comes after a `--` is the script's whatever it looks like, and so is the `--`.

    Raises:
        ConfigError: A flag of ours has a value that it cannot have.
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
        trainer_budget_bytes=parse_bytes(budget, name=BUDGET) if isinstance(budget, str) else budget,
        script_words=(*rest, *words[end:]),
        remarks=tuple(
            _find_remarks(offload, {word.partition("=")[0] for word in words[:end]} & set(parser.find_given(words[:end])))
        ),
    )


def _find_remarks(offload: OffloadConfig | None, given: set[str]) -> Iterator[str]:
    """Yield what among the flags `given` changes nothing, and why."""
    is_switched = any(flag.endswith(SWITCH[2:]) for flag in given)
    if offload is None and given - {BUDGET} and not is_switched:
        yield f"{' '.join(sorted(given - {BUDGET}))} without {SWITCH} has no effect. Add that flag."
    if offload is not None and offload.activation_offload_fraction == 0:
        yield "--activation-offload-fraction 0 keeps all sites on the GPU. Give a part above 0."
