"""What a check found."""

import dataclasses
import enum


class Status(enum.Enum):
    """What a result means for training with offload."""

    OK = "ok"  # nothing to do
    WARNING = "warning"  # it works, and could be faster or use less
    ERROR = "error"  # it does not work, or not as asked, and may not say so
    SKIPPED = "skipped"  # could not be checked here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One row."""

    name: str
    status: Status
    found: str
    """What there is; where skipped, why."""
    fix: str = ""
    """What to do; empty where there is nothing."""


def skip(name: str, reason: str) -> CheckResult:
    """Return the result of a check that could not be made."""
    return CheckResult(name=name, status=Status.SKIPPED, found=reason)
