"""The result of a check."""

import dataclasses
import enum


class Status(enum.Enum):
    """Outcome of a check, for training with offload."""

    OK = "ok"  # no action needed
    WARNING = "warning"  # works, but could be faster or use less
    ERROR = "error"  # does not work, or silently not as requested
    SKIPPED = "skipped"  # cannot be checked here


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: a row of the table."""

    name: str
    status: Status
    found: str
    """Finding, or the reason for skipping the check."""
    fix: str = ""
    """Fix; empty if none is needed."""


def ok(name: str, found: str) -> CheckResult:
    """Return the result of a check that found nothing to do."""
    return CheckResult(name, Status.OK, found)


def warn(name: str, found: str, fix: str) -> CheckResult:
    """Return the result of a check that found something slow or wasteful."""
    return CheckResult(name, Status.WARNING, found, fix)


def fail(name: str, found: str, fix: str) -> CheckResult:
    """Return the result of a check that found something that does not work."""
    return CheckResult(name, Status.ERROR, found, fix)


def skip(name: str, reason: str) -> CheckResult:
    """Return the result of a check that cannot be made."""
    return CheckResult(name, Status.SKIPPED, reason)
