"""Results of checks."""

import dataclasses
import enum


class Status(enum.Enum):
    """Severity of a check's finding."""

    OK = "ok"  # no action needed
    WARNING = "warning"  # training works, but could be faster or use less memory
    ERROR = "error"  # training does not work, or silently not as requested
    SKIPPED = "skipped"  # cannot be checked here


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: a row of the table."""

    name: str
    status: Status
    found: str
    """The finding, or why the check was skipped."""
    fix: str = ""
    """How to fix it. Empty if no action is needed."""


def ok(name: str, found: str) -> CheckResult:
    """Return the result of a check that found no problem."""
    return CheckResult(name, Status.OK, found)


def warn(name: str, found: str, fix: str) -> CheckResult:
    """Return the result of a check that found a problem of speed or memory."""
    return CheckResult(name, Status.WARNING, found, fix)


def fail(name: str, found: str, fix: str) -> CheckResult:
    """Return the result of a check that found a failure."""
    return CheckResult(name, Status.ERROR, found, fix)


def skip(name: str, reason: str) -> CheckResult:
    """Return the result of a check that cannot run here."""
    return CheckResult(name, Status.SKIPPED, reason)
