"""Predicts the next backward from the step before, since pipeline schedules repeat.

A step ends when a forward begins and no lane waits for its backward. A wrong prediction only costs time, see [Note: Prefetch
across passes] in `fgoffload.transfer_schedule`.
"""

import weakref
from typing import NamedTuple

from fgoffload.engine.group import Lane

MOST_FORWARDS = 1 << 16
"""Maximum number of recorded forwards of a step. Large steps have thousands. With a retained graph a step never ends."""


class _Pass(NamedTuple):
    is_backward: bool
    number: int
    """Number of the lane, which is the number of forwards before it in the step."""


class PassOrder:
    """Records the passes of this step, and predicts the next backward from the step before."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self._next: dict[_Pass, int] = {}
        """Number of the lane whose backward followed each pass of the step before, directly or after one forward."""
        self._lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
        """Lanes whose backward has not begun, by number."""
        self._forwards = 0

    def begin_forward(self, lane: Lane) -> Lane | None:
        """Return the lane whose backward directly follows the forward of `lane`, if there is one and it is known."""
        if not self._lanes or self._forwards >= MOST_FORWARDS:
            self._learn()
        lane.number = self._forwards
        self._lanes[lane.number] = lane
        self._forwards += 1
        return self._note(_Pass(is_backward=False, number=lane.number))

    def begin_backward(self, lane: Lane) -> Lane | None:
        """Return the lane whose backward follows that of `lane`, directly or after one forward, if it is known."""
        if self._lanes.get(lane.number) is not lane:  # another backward of a retained graph
            return None
        del self._lanes[lane.number]
        return self._note(_Pass(is_backward=True, number=lane.number))

    def _note(self, one: _Pass) -> Lane | None:
        self._passes.append(one)
        number = self._next.get(one)
        return None if number is None else self._lanes.get(number)

    def _learn(self) -> None:
        passes, self._passes, self._next, self._forwards = self._passes, [], {}, 0
        self._lanes.clear()
        for one, after, later in zip(passes, passes[1:], [*passes[2:], None], strict=False):
            coming = later if one.is_backward and not after.is_backward else after
            if coming is not None and coming.is_backward and coming.number != one.number:
                self._next[one] = coming.number
