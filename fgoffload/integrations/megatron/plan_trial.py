"""Which of two plans for a budget is faster, by the training's own steps.

[Note: Two plans]
A plan is made for a host that launches in time, as a measured step has every stretch ([Note: A late host] in
`fgoffload.planner.late_host`). Where something leaves by it, a few of its steps are timed, then a few by the plan for a late
host, and the faster one stays. Every step counts for the training: both plans compute the same bits. A step takes from its
beginning to that of the next, with whatever the training does between; the median leaves out one that an evaluation or a
checkpoint came behind. The first step under a plan is not timed: memory finds its place in it.
"""

import statistics

TIMED_STEPS = 3
"""Of each plan, after its first. The fewest of which a median leaves one out: they run by the slower plan too."""


class StepTimes:
    """Times the steps under the plan in use, on this process.

    Args:
        now_s: When the first one begins, by a clock that only goes forward.
    """

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._seconds: list[float] = []
        self._steps = 0

    def note_end(self, now_s: float, *, is_full: bool) -> None:
        """A step is over, and the next one begins.

        Args:
            now_s: By that clock.
            is_full: Whether it had all the microbatches that the plan is for: others are not timed.
        """
        if is_full:
            self._steps += 1
            if self._steps > 1:
                self._seconds.append(now_s - self._begun_s)
        self._begun_s = now_s

    @property
    def median_s(self) -> float | None:
        """Return what a step takes; None before enough were timed."""
        return statistics.median(self._seconds) if len(self._seconds) >= TIMED_STEPS else None
