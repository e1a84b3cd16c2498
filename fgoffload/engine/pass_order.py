"""Predicts the next backward from the previous step, because pipeline schedules repeat their order of passes.

A step ends when a forward begins while no lane waits for its backward. A wrong prediction costs only time (see [Note: Prefetch
across passes] in `fgoffload.transfer_schedule`).
"""

import weakref
from typing import NamedTuple

from fgoffload.engine.group import Lane

MOST_FORWARDS = 1 << 16
"""Maximum number of forwards to record per step. Large steps have thousands. With a retained graph, a step may never end."""


class _Pass(NamedTuple):
    is_backward: bool
    number: int
    """Lane number, which is the number of earlier forwards in the step."""


class PassOrder:
    """Records the passes of the current step, and predicts the next backward from the passes of the previous step."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self._next: dict[_Pass, int] = {}
        """Maps each pass of the previous step to the number of the lane whose backward followed, perhaps after one forward."""
        self._lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
        """Lanes whose backward has not begun, keyed by number."""
        self._forwards = 0

    def begin_forward(self, lane: Lane) -> Lane | None:
        """Record the forward of `lane`. Return the lane whose backward is predicted to follow directly, or None."""
        if not self._lanes or self._forwards >= MOST_FORWARDS:
            self._start_step()
        lane.number = self._forwards
        self._lanes[lane.number] = lane
        self._forwards += 1
        return self._record(_Pass(is_backward=False, number=lane.number))

    def begin_backward(self, lane: Lane) -> Lane | None:
        """Record the backward of `lane`. Return the lane whose backward is predicted to follow, or None."""
        if self._lanes.get(lane.number) is not lane:  # another backward of a retained graph
            return None
        del self._lanes[lane.number]
        return self._record(_Pass(is_backward=True, number=lane.number))

    def _record(self, current: _Pass) -> Lane | None:
        self._passes.append(current)
        number = self._next.get(current)
        return None if number is None else self._lanes.get(number)

    def _start_step(self) -> None:
        passes, self._passes, self._next, self._forwards = self._passes, [], {}, 0
        self._lanes.clear()
        for current, second, third in zip(passes, passes[1:], [*passes[2:], None], strict=False):
            following = third if current.is_backward and not second.is_backward else second
            if following is not None and following.is_backward and following.number != current.number:
                self._next[current] = following.number
