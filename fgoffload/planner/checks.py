"""Checks of numbers that users give, for the shapes and the hardware of the planner."""

import math

from fgoffload.errors import ConfigError


def check_count(name: str, count: object) -> None:
    """Refuse what is not a whole number from 1.

    Args:
        name: The field, as the user wrote it.
        count: What was given.

    Raises:
        ConfigError: With the field, the value and the fix.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"{name} {count!r} is no whole number. Give an int.")
    if count < 1:
        raise ConfigError(f"{name} {count} is below 1. Give 1 or more.")


def check_rate(name: str, rate: object) -> None:
    """Refuse what is neither None nor a finite number above 0.

    Args:
        name: The field, as the user wrote it.
        rate: What was given, in its unit a second.

    Raises:
        ConfigError: With the field, the value and the fix.
    """
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ConfigError(f"{name} {rate!r} is no number. Give one like 50e9, or leave it out where it is not known.")
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"{name} {rate} is not above 0 and finite. Give such a number, or leave it out where it is not known."
        )
