"""Compares two plans by the peak memory and step time of a few measured steps."""

import dataclasses

from fgoffload.units import format_bytes, format_ms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Peak memory and step time of a few measured steps under a plan."""

    peak_bytes: int  # highest peak device bytes of all ranks; 0 if not measured
    step_s: float  # median seconds of a step

    def score(self, budget_bytes: int) -> tuple[int, float]:
        """Return a sort key (lower is better): bytes above the budget, then seconds."""
        return (max(self.peak_bytes - budget_bytes, 0), self.step_s)

    def describe(self) -> str:
        """Return the step time and peak as text for the log."""
        peak = f" at {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        return f"{format_ms(self.step_s)}{peak}"


def describe_tried(first: Tried, second: Tried, *, made: tuple[str, str]) -> str:
    """Return a log message that compares measured steps under two plans. `made` says how each plan was made."""
    return f"a step takes {first.describe()} under the plan {made[0]}, and {second.describe()} under the plan {made[1]}"
