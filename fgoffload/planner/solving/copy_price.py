"""What programs and moves have to take copies for, so that plans are not late.

A program knows what a layer's copies cost next to layers that do the same. Where the layers of a plan move more together than
the link can take, all are late, and the simulator says by how much. So the next program gets a price for each byte.
"""

import collections
import math
from collections.abc import Sequence

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.chunk_totals import count_copy_room_s
from fgoffload.planner.solving.placement import LayerSlot, State

_FULL = 0.95
"""Of the time that copies have in a forward: from here on one more byte is waited for."""


class CopyPrice:
    """Seconds that a byte which leaves costs beside what was measured of its layer: as little as makes copies not late."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        """To ask with next."""
        self._too_low, self._too_high = 0.0, math.inf
        self._late_bytes = 0
        """What left at the highest price that was too low."""

    @property
    def is_between(self) -> bool:
        """Whether far less left, and on time, at one price than at a lower one that was too low: the best may lie between."""
        return self._too_high < math.inf

    def learn(self, late_s: float, moved_bytes: int, *, most_late_s: float) -> None:
        """Take note of what a plan at this price comes to.

        Args:
            late_s: Seconds that it takes longer than its program said.
            moved_bytes: What leaves.
            most_late_s: Up to so many seconds a plan is on time.
        """
        if late_s > most_late_s:
            self._too_low, self._late_bytes = self.s_per_byte, moved_bytes
        elif 2 * moved_bytes < self._late_bytes:
            self._too_high = self.s_per_byte
        else:
            self._too_high = math.inf  # about as much as can leave
        if self.is_between:
            self.s_per_byte = (self._too_low + self._too_high) / 2
        else:
            self.s_per_byte += max(late_s, 0.0) / max(moved_bytes, 1)


def find_link_price(rank: RankModel, slots: Sequence[LayerSlot], state: State) -> float:
    """Return the seconds that one more byte takes where the link has no room for it in a forward; else 0.

    Args:
        rank: The rank.
        slots: Its layers.
        state: What they do.
    """
    moved_bytes: collections.Counter[int] = collections.Counter()
    for slot, configuration in zip(slots, state, strict=True):
        moved_bytes[slot.chunk] += configuration.moved_bytes
    price = 1 / rank.link.d2h_bytes_per_s
    rooms = enumerate(count_copy_room_s(rank, chunk) for chunk in rank.chunks)
    return price if any(moved_bytes[number] * price > _FULL * room_s for number, room_s in rooms) else 0.0
