"""The result of a check, including its status."""

import dataclasses
import enum


class Status(enum.Enum):
    """Severity of a result."""

    OK = "ok"  # no action needed
    WARNING = "warning"  # training works, but is slower or uses more memory than necessary
    ERROR = "error"  # training fails, or silently does not do what was requested
    SKIPPED = "skipped"  # the check cannot run on this machine


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check, shown as a row of the table."""

    name: str
    status: Status
    found: str
    """The finding, or the reason for skipping the check."""
    fix: str = ""
    """How to fix the problem. Empty if there is no problem."""


def ok(name: str, found: str) -> CheckResult:
    """Return a result for a check that found no problem."""
    return CheckResult(name, Status.OK, found)


def warn(name: str, found: str, fix: str) -> CheckResult:
    """Return a result for a problem that costs speed or memory."""
    return CheckResult(name, Status.WARNING, found, fix)


def fail(name: str, found: str, fix: str) -> CheckResult:
    """Return a result for a problem that breaks training."""
    return CheckResult(name, Status.ERROR, found, fix)


def skip(name: str, reason: str) -> CheckResult:
    """Return a result for a check that cannot run on this machine."""
    return CheckResult(name, Status.SKIPPED, reason)
