"""The result of a check."""

import dataclasses
import enum


class Status(enum.Enum):
    """Outcome of a check, for training with offload."""

    OK = "ok"  # no action needed
    WARNING = "warning"  # works, but could be faster or use less
    ERROR = "error"  # does not work, or silently not as requested
    SKIPPED = "skipped"  # cannot be checked here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check: a row of the table."""

    name: str
    status: Status
    found: str
    """Finding, or the reason for skipping the check."""
    fix: str = ""
    """Fix; empty if none is needed."""


def skip(name: str, reason: str) -> CheckResult:
    """Return the result of a check that cannot be made."""
    return CheckResult(name=name, status=Status.SKIPPED, found=reason)
