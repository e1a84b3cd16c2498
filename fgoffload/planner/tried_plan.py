"""Measured peak and time of a few steps under a plan, to compare two plans."""

import dataclasses
import math

from fgoffload.units import format_bytes, format_ms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Measured peak and time of a few steps under a plan."""

    peak_bytes: int  # peak device bytes of any rank; 0 if they are not counted
    step_s: float  # median seconds of a step; infinite if the steps did not finish

    def score(self, budget_bytes: int) -> tuple[int, float]:
        """Return the sort key, lower is better: bytes above the budget, then seconds."""
        return (max(self.peak_bytes - budget_bytes, 0), self.step_s)

    def describe(self) -> str:
        """Return time and peak for a log."""
        peak = f" at {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        return f"{format_ms(self.step_s)}{peak}" if self.step_s < math.inf else f"more than {format_bytes(self.peak_bytes)}"


def describe_tried(first: Tried, second: Tried, *, made: tuple[str, str]) -> str:
    """Return a comparison of the steps of two plans, for a log."""
    return f"a step takes {first.describe()} by the plan {made[0]}, and {second.describe()} by the one {made[1]}"
