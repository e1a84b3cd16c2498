"""The result of a check."""

import dataclasses
import enum


class Status(enum.Enum):
    """What a result means for training with offload."""

    OK = "ok"  # no action needed
    WARNING = "warning"  # works, but could be faster or use less
    ERROR = "error"  # does not work, or silently not as requested
    SKIPPED = "skipped"  # cannot be checked here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One row of the table."""

    name: str
    status: Status
    found: str
    """What was found; if skipped, the reason."""
    fix: str = ""
    """What to do; empty if nothing."""


def skip(name: str, reason: str) -> CheckResult:
    """Return the result of a skipped check."""
    return CheckResult(name=name, status=Status.SKIPPED, found=reason)
