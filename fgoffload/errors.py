"""Exceptions of fgoffload.

Every error that a user can cause names the value as typed, the limit and the fix.

    OffloadError
    ├── ConfigError        a flag or an option has a wrong value (also a ValueError)
    ├── PlanError          a plan does not fit the model
    │   └── BudgetError    no plan fits the budget
    ├── IntegrationError   a framework lacks a symbol, or a selected tag found nothing to do
    ├── StateError         tensors or calls are in a state in which results could be wrong (also a RuntimeError, which
    │                      torch raises for a saved tensor that was changed in place)
    └── InternalError      a bug in fgoffload: please report it
"""

LONGEST_MESSAGE = 2000
"""Maximum characters of a message. Errors repeat values from users and files, which may have any length."""


class OffloadError(Exception):
    """Base of all errors that fgoffload raises on purpose. Long messages are shortened, see `shorten_message`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shorten_message(arg) if isinstance(arg, str) else arg for arg in args))


def shorten_message(message: str) -> str:
    """Return `message` without its middle if it is longer than `LONGEST_MESSAGE`. Flag and fix are at the two ends."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    part = LONGEST_MESSAGE // 2 - 3
    return f"{message[:part]} ... {message[-part:]}"


class ConfigError(OffloadError, ValueError):
    """A flag or an option has a wrong value."""


class PlanError(OffloadError):
    """A plan does not fit the model, or (as `BudgetError`) no plan fits the budget."""


class BudgetError(PlanError):
    """No plan fits a memory budget.

    Args:
        why: Sentence that names the part that does not fit.
        least_bytes: Smallest budget with a known plan, in bytes.
    """

    def __init__(self, why: str, least_bytes: int) -> None:
        super().__init__(why, least_bytes)
        self.why = why
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        """Return the reason and the fix."""
        return f"{self.why} Use a budget of {_spell_at_least(self.least_bytes)} or more, or spread the model over more ranks."


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
    """A bug in fgoffload."""
