"""Times the steps of a training under each of two plans, to keep the faster one.

[Note: Two plans]
The first step of a training is cold: kernels are loaded, the allocator grows, and host memory is pinned during offload. Its
times include all that. The plan from them applies from the second step on, and a few of its steps are timed. Then one more step
is measured in the same way, now warm. A second plan is made from it, with the overhead beside copies that the timed steps
showed ([Note: Cost of copies on a launch-bound host] in `planner/host_overhead.py`). A few steps under it are timed too, and
the faster plan is kept. Every step counts for the training: results are bitwise identical. A step lasts until the next one
begins, including all that the training does in between. The median ignores one step that an evaluation or checkpoint follows.
The first step under a plan is not timed, since the allocator adapts in it.

[Note: What ends a trial]
A step with more or larger microbatches than planned ends a trial. A repeated measurement that was not used is then dropped, and
all starts over with a plan for that step. Smaller steps are neither timed nor measured; they run under the plan in use. The
first plan is kept if the repeated step would exceed the budget, does not end or has no profile, if it leads to no plan or to
the same one, and if the second plan takes more than the budget and than the first plan.
"""

import statistics

TIMED_STEPS = 3
"""Timed steps of each plan, after its first step. The fewest whose median ignores one: the slower plan runs them too."""


class StepTimes:
    """Times the steps under the plan in use, on this process.

    Args:
        now_s: Time at which the first step begins, in seconds of a monotonic clock.
    """

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._seconds: list[float] = []
        self._steps = 0

    def note_end(self, now_s: float, *, is_full: bool) -> None:
        """Record that a step has ended and the next one begins.

        Args:
            now_s: Time of that clock.
            is_full: Whether the step had all the microbatches of the plan. Other steps are not timed.
        """
        if is_full:
            self._steps += 1
            if self._steps > 1:
                self._seconds.append(now_s - self._begun_s)
        self._begun_s = now_s

    @property
    def median_s(self) -> float | None:
        """Return the median seconds of a step; None until enough steps were timed."""
        return statistics.median(self._seconds) if len(self._seconds) >= TIMED_STEPS else None
