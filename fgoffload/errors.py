"""The exceptions of fgoffload.

Every error that a user can cause says three things: the value as it was typed, the limit that it broke, and what to do.

    OffloadError
    ├── ConfigError        a flag or an option cannot be what it is (also a ValueError)
    ├── PlanError          a plan does not fit the model
    │   └── BudgetError    no plan fits the budget
    ├── IntegrationError   a framework lacks a symbol, or a selected tag found nothing to do
    ├── StateError         tensors or calls came in a state in which results could not be right (also a RuntimeError,
    │                      as what torch raises for a saved tensor that was changed in place)
    └── InternalError      a fault of fgoffload itself: please report it
"""

import re

LONGEST_VALUE = 200
"""Characters of a value that an error repeats."""

LONGEST_MESSAGE = 4000
"""Characters of a whole message: a value may be many short words."""

_QUOTED_OR_LONG = re.compile(rf"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S{{{LONGEST_VALUE + 1},}}""")


class OffloadError(Exception):
    """Base of all errors that fgoffload raises on purpose. Messages cut the values that they repeat: see `cut_values`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(cut_values(arg) if isinstance(arg, str) else arg for arg in args))


def cut_values(message: str) -> str:
    """Return `message` with its quoted values and its words cut at `LONGEST_VALUE` characters.

    What an error repeats was typed or read from a file, and may be of any length. A message that is cut stays as it is when
    another error takes it in.
    """
    message = _QUOTED_OR_LONG.sub(_cut_value, message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    part = LONGEST_MESSAGE // 2 - 3  # its start has the flag, and its end the fix
    return f"{message[:part]} ... {message[-part:]}"


def _cut_value(match: re.Match[str]) -> str:
    value = match[0]
    quote = value[0] if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1 else ""
    if len(value) <= LONGEST_VALUE + 2 * len(quote):
        return value
    return f"{value[: LONGEST_VALUE - 3 + len(quote)]}...{quote}"


class ConfigError(OffloadError, ValueError):
    """A flag or an option cannot be what it is."""


class PlanError(OffloadError):
    """A plan does not fit the model, or no plan fits the budget: then it is a `BudgetError`."""


class BudgetError(PlanError):
    """No plan fits a memory budget.

    Args:
        why: What is lacking where, in a whole sentence.
        least_bytes: The nearest budget that a plan was found for.
    """

    def __init__(self, why: str, least_bytes: int) -> None:
        super().__init__(why, least_bytes)
        self.why = why
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        """Return what is lacking, and the fix."""
        return f"{self.why} Give a budget of {_spell_at_least(self.least_bytes)} or more, or spread the model over more ranks."


def _spell_at_least(size_bytes: int) -> str:
    """Return a size as flags take it, of that many bytes or up to a thousandth more: the next GiB may be far."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= 1024 * scale:
            return f"{-(-size_bytes // scale)}{unit}"
    return f"{size_bytes}B"


class IntegrationError(OffloadError):
    """A framework lacks a symbol that is needed, or a selected tag found nothing to do."""


class StateError(OffloadError, RuntimeError):
    """Tensors or calls came in a state in which results could not be right."""


class InternalError(OffloadError):
    """A fault of fgoffload itself."""
