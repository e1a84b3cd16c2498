"""Which of two plans for a budget is faster, by the training's own steps.

[Note: Two plans]
The first step of a training is cold: kernels are loaded, the allocator grows, and host memory is locked while layers leave. Its
plan has all that in its times, and applies from the second step on. A few of its steps are timed. Then one more step is
measured, as the first one was, with all warm, and a second plan is made of that one: as late beside copies as the host was in
the steps that were timed ([Note: Cost of copies on a launch-bound host] in `planner/host_overhead.py`). A few steps by it are
timed too, and the faster one stays. Every step counts for the training: all compute the same bits. A step takes from its
beginning to that of the next, with whatever the training does between; the median leaves out one that an evaluation or a
checkpoint came behind. The first step under a plan is not timed: memory finds its place in it.

[Note: What ends a trial]
More or larger microbatches than the plan is for end it wherever it is: what was measured again and not taken is dropped, and
all begins anew with a plan for them. Smaller steps are neither timed nor measured: they run by the plan that is in use. The
first plan stays where a step that is measured again would be above the budget, does not end or has no profile, where no plan
comes of it or the same one, and where the second plan takes more than the budget and than the first.
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
