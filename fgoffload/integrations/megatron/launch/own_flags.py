"""Separates our flags from the words that a script gets."""

import dataclasses
from collections.abc import Iterator, Sequence

from fgoffload.config import AUTO, OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.units import parse_bytes

SWITCH, BUDGET = "--fine-grained-activation-offloading", "--offload-memory-budget"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """Settings of offload in the words of a script."""

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
    budget = None if offload is not None else values.offload_memory_budget
    return OwnFlags(
        offload=offload,
        trainer_budget=budget if budget in (None, AUTO) else _read_budget(budget),
        script_words=(*rest, *words[end:]),
        remarks=tuple(
            _find_remarks(offload, {word.partition("=")[0] for word in words[:end]} & set(parser.find_given(words[:end])))
        ),
    )


def _read_budget(text: str) -> int:
    budget_bytes = parse_bytes(text, name=f"{COMMAND_LINE}: {BUDGET}", needs_unit=True)
    if budget_bytes <= 0:
        raise ConfigError(f"{COMMAND_LINE}: {BUDGET} {text} leaves no GPU memory. Give a size like 60GiB.")
    return budget_bytes


def _find_remarks(offload: OffloadConfig | None, given: set[str]) -> Iterator[str]:
    """Yield a sentence for each of the flags `given` that has no effect, with the reason."""
    is_switched = any(flag.endswith(SWITCH[2:]) for flag in given)
    if offload is None and given - {BUDGET} and not is_switched:
        yield f"{' '.join(sorted(given - {BUDGET}))} has no effect without {SWITCH}. Add {SWITCH}."
    if offload is not None and offload.activation_offload_fraction == 0:
        yield "--activation-offload-fraction 0 keeps all sites on the GPU. Give a part above 0."
