"""Validates the numbers that users set in model shapes and hardware files."""

import math
from collections.abc import Sequence

from fgoffload.errors import ConfigError

LARGEST_SIZE = 10**8
"""Maximum number of channels, heads, experts, tokens, sequences or ranks. Products of larger numbers overflow in the solver."""

SLOWEST_PER_S, FASTEST_PER_S = 1e6, 1e21
"""Allowed range of bytes or operations per second, far wider than real devices need. Outside it, times over- or underflow."""


def check_count(name: str, count: object, *, least: int = 1, most: int | None = None) -> None:
    """Reject `count` unless it is a whole number from `least` to `most`."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"{name} {count!r} is not a whole number. Use an int.")
    if count < least:
        raise ConfigError(f"{name} {count} is below {least}. Use {least} or more.")
    if most is not None and count > most:
        raise ConfigError(f"{name} {count} is above {most}, the planner's maximum. Use {most} or less.")


def check_part(name: str, part: object, *, example: object) -> None:
    """Reject `part` unless it is a number above 0 and at most 1."""
    if isinstance(part, bool) or not isinstance(part, (int, float)):
        raise ConfigError(f"{name} {part!r} is not a number. Use a fraction, for example {example}.")
    if not 0 < part <= 1:
        raise ConfigError(f"{name} {part} must be above 0 and at most 1. Use a fraction, for example {example}.")


def check_rate(name: str, rate: object) -> None:
    """Reject `rate` unless it is None or a finite number above 0."""
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ConfigError(f"{name} {rate!r} is not a number. Use a number, for example 50e9, or remove it if unknown.")
    if not 0 < rate < math.inf:
        raise ConfigError(f"{name} {rate} must be finite and above 0. Use a number, for example 50e9, or remove it if unknown.")


def check_device_rate(name: str, rate: float | None) -> None:
    """Reject a rate from a file unless it is None or a number within the allowed range."""
    check_rate(name, rate)
    if rate is not None and not SLOWEST_PER_S <= rate <= FASTEST_PER_S:
        raise ConfigError(
            f"{name} {str(rate)[:20]} must be from {SLOWEST_PER_S:g} to {FASTEST_PER_S:g} per second. For 50 GB/s, use 50e9."
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Reject `value` unless it is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not supported. Use one of: {', '.join(map(repr, choices))}.")
