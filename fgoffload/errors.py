"""Exceptions of fgoffload.

Every error that a user can cause names the value as typed, the limit, and the fix.

    OffloadError
    ├── ConfigError        a flag or an option has a wrong value (also a ValueError)
    ├── PlanError          a plan does not fit the model
    │   └── BudgetError    no plan fits the budget
    ├── IntegrationError   a framework lacks a symbol, or a selected tag found nothing to do
    ├── StateError         tensors or calls are in a state in which results could be wrong (also a RuntimeError, which
    │                      torch raises for a saved tensor that was changed in place)
    └── InternalError      a bug in fgoffload: please report it
"""

import re

LONGEST_VALUE = 200
"""Maximum characters of a value that an error repeats."""

LONGEST_MESSAGE = 4000
"""Maximum characters of a message, since a value may consist of many short words."""

_QUOTED_OR_LONG = re.compile(rf"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S{{{LONGEST_VALUE + 1},}}""")


class OffloadError(Exception):
    """Base of all errors that fgoffload raises on purpose. Long values in messages are cut, see `cut_values`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(cut_values(arg) if isinstance(arg, str) else arg for arg in args))


def cut_values(message: str) -> str:
    """Return `message` with its quoted values and its words cut at `LONGEST_VALUE` characters.

    Values come from the user or a file and may have any length. Cutting twice changes nothing.
    """
    message = _QUOTED_OR_LONG.sub(_cut_value, message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    part = LONGEST_MESSAGE // 2 - 3  # the start has the flag, the end has the fix
    return f"{message[:part]} ... {message[-part:]}"


def _cut_value(match: re.Match[str]) -> str:
    value = match[0]
    quote = value[0] if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1 else ""
    if len(value) <= LONGEST_VALUE + 2 * len(quote):
        return value
    return f"{value[: LONGEST_VALUE - 3 + len(quote)]}...{quote}"


class ConfigError(OffloadError, ValueError):
    """A flag or an option has a wrong value."""


class PlanError(OffloadError):
    """A plan does not fit the model, or (as `BudgetError`) no plan fits the budget."""


class BudgetError(PlanError):
    """No plan fits a memory budget.

    Args:
        why: Sentence that says what does not fit.
        least_bytes: Smallest budget with a known plan, in bytes.
    """

    def __init__(self, why: str, least_bytes: int) -> None:
        super().__init__(why, least_bytes)
        self.why = why
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        """Return the reason and the fix."""
        return f"{self.why} Give a budget of {_spell_at_least(self.least_bytes)} or more, or spread the model over more ranks."


def _spell_at_least(size_bytes: int) -> str:
    """Return a size as flags take it, rounded up by at most a thousandth."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= 1024 * scale:
            return f"{-(-size_bytes // scale)}{unit}"
    return f"{size_bytes}B"


class IntegrationError(OffloadError):
    """A framework lacks a symbol, or a selected tag has no effect."""


class StateError(OffloadError, RuntimeError):
    """Tensors or calls are in a state in which results could be wrong."""


class InternalError(OffloadError):
    """Bug in fgoffload itself."""
