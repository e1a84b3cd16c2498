"""Checks of numbers that users give, for the shapes and the hardware of the planner."""

import math
from collections.abc import Sequence

from fgoffload.errors import ConfigError

LARGEST_SIZE = 10**8
"""Most channels, heads, experts, tokens, sequences or ranks: a thousand times those of the largest models, and ten times their
longest sequences. Products of larger numbers leave the range of the solver, which then finds no plan."""

SLOWEST_PER_S, FASTEST_PER_S = 1e6, 1e21
"""Range of bytes or operations a second: a thousandth of any link or network of a device, and ten thousand times any device's
compute. Outside, times leave the range of numbers."""


def check_count(name: str, count: object, *, least: int = 1, most: int | None = None) -> None:
    """Refuse a value that is not a whole number within its limits."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"{name} {count!r} is no whole number. Give an int.")
    if count < least:
        raise ConfigError(f"{name} {count} is below {least}. Give {least} or more.")
    if most is not None and count > most:
        raise ConfigError(f"{name} {count} is above {most}, which no plan is made for. Give {most} or less.")


def check_part(name: str, part: object, *, example: object) -> None:
    """Refuse a value that is not a number above 0 and at most 1."""
    if isinstance(part, bool) or not isinstance(part, (int, float)):
        raise ConfigError(f"{name} {part!r} is no number. Give one like {example}.")
    if not 0 < part <= 1:
        raise ConfigError(f"{name} {part} is not above 0 and at most 1. Give a part like {example}.")


def check_rate(name: str, rate: object) -> None:
    """Refuse a value that is neither None nor a finite number above 0."""
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ConfigError(f"{name} {rate!r} is no number. Give one like 50e9, or leave it out where it is not known.")
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"{name} {rate} is not above 0 and finite. Give such a number, or leave it out where it is not known."
        )


def check_device_rate(name: str, rate: float | None) -> None:
    """Check a rate from a file: as `check_rate`, and refuse rates that no device has."""
    check_rate(name, rate)
    if rate is not None and not SLOWEST_PER_S <= rate <= FASTEST_PER_S:
        raise ConfigError(
            f"{name} {str(rate)[:20]} is not from {SLOWEST_PER_S:g} to {FASTEST_PER_S:g} a second, as rates of devices are. "
            "Give it as in 50e9, which is 50 GB/s."
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is none of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not known. Give one of: {', '.join(map(repr, choices))}.")
