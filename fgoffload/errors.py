"""Exceptions that fgoffload raises.

The message of every error that a user can cause gives the value as typed, the limit and the fix.

    OffloadError
    ├── ConfigError        a flag or an option has an invalid value (also a ValueError)
    ├── PlanError          a plan is invalid or does not fit the model
    │   └── BudgetError    no plan fits the budget
    ├── IntegrationError   a framework is missing or incompatible, or a selected tag has no effect
    ├── StateError         a tensor, a call order or the machine prevents correct offload (also a RuntimeError, which
    │                      torch raises for a saved tensor that was modified in place)
    └── InternalError      a bug in fgoffload: please report it
"""

MAX_MESSAGE_LENGTH = 2000
"""Maximum length of a message in characters. Messages quote values from users and files, which may be very long."""


class OffloadError(Exception):
    """Base class of all fgoffload errors. Long messages are shortened (see `shorten_message`)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shorten_message(arg) if isinstance(arg, str) else arg for arg in args))


def shorten_message(message: str) -> str:
    """Remove the middle of a message longer than `MAX_MESSAGE_LENGTH`. The flag is at its start, and the fix at its end."""
    if len(message) <= MAX_MESSAGE_LENGTH:
        return message
    part = MAX_MESSAGE_LENGTH // 2 - 3
    return f"{message[:part]} ... {message[-part:]}"


class ConfigError(OffloadError, ValueError):
    """A flag or an option has an invalid value."""


class PlanError(OffloadError):
    """A plan is invalid or does not fit the model, or (as `BudgetError`) no plan fits the budget."""


class BudgetError(PlanError):
    """No plan fits a memory budget.

    Args:
        why: Sentence that says what does not fit.
        least_bytes: Smallest budget, in bytes, for which a plan exists.
    """

    def __init__(self, why: str, least_bytes: int) -> None:
        super().__init__(why, least_bytes)
        self.why = why
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        return f"{self.why} Use a budget of {_round_up(self.least_bytes)} or more, or spread the model over more ranks."


def _round_up(size_bytes: int) -> str:
    """Format a size for a flag, rounded up by at most 1%."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{-(-100 * size_bytes // scale) / 100:.2f}{unit}"
    return f"{size_bytes}B"


class IntegrationError(OffloadError):
    """A framework is missing or incompatible, or a selected tag has no effect."""


class StateError(OffloadError, RuntimeError):
    """The state of a tensor, of the engine or of the machine prevents correct offload."""


class InternalError(OffloadError):
    """A bug in fgoffload."""
