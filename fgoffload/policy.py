"""The rules of the window and of prefetch, in one copy that the engine and the simulator both use.

Both rules count bytes, never tensors or groups: groups of one model differ in size by a hundred times.
"""

import dataclasses
import enum
import math

from fgoffload.errors import ConfigError
from fgoffload.units import GIB, MIB, check_bytes

DEFAULT_WINDOW_BYTES = 1 * GIB
"""Bytes. At 50 GB/s to host this is 21 ms of copies, the forward of one or two large MoE layers: enough that compute never
waits for a burst, and 1% of an 80 GB device. Source: link rates in docs/concepts/how_it_works.md."""

DEFAULT_PREFETCH_BYTES = 512 * MIB
"""Bytes. At 50 GB/s to device this is 11 ms ahead of backward, more than the largest group of the reference workloads."""

STAGING_SLOTS = 2
"""Slots through which captured modules offload: one that graphs use, and one that is copied meanwhile."""

HOST_SHARE = 0.6
"""The part of a node's host memory that all its ranks together take at most where nobody says otherwise: the engine of what is
free at start, the planner of what the node has. The rest is for data loaders, checkpoints in the making and the page cache."""


PLANNED_SHARE = 0.998
"""The part of a device memory budget that a plan may use where a training has to keep to it: the bytes of layers are exact, and
those of what operators have for a moment are not."""


def count_planned_bytes(budget_bytes: int, *, free_bytes: int) -> int:
    """Return the device bytes that a plan may use of a budget.

    Args:
        budget_bytes: Of a device.
        free_bytes: What a step took more than was predicted of it, which plans leave free.
    """
    return min(round(budget_bytes * PLANNED_SHARE), budget_bytes - free_bytes)


def count_budget_bytes(planned_bytes: int, *, free_bytes: int) -> int:
    """Return the least budget of which a plan may use `planned_bytes`: the inverse of `count_planned_bytes`."""
    return max(math.ceil((planned_bytes - 0.5) / PLANNED_SHARE), planned_bytes + free_bytes)


class HostMemory(enum.Enum):
    """What offloaded bytes lie in on the host."""

    PINNED = "pinned"  # locked: copies run at the link's rate, and beside compute
    PAGEABLE = "pageable"  # not locked: slower, and the host waits for each copy to it, but the system may swap it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """How far copies may run behind forward and ahead of backward."""

    window_bytes: int = DEFAULT_WINDOW_BYTES
    """The most bytes that may be on their way to the host before compute has to wait for the oldest of them."""
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES
    """The most bytes that may be back on the device before the group that backward is in has asked for them."""

    def __post_init__(self) -> None:
        """Refuse what is no size, and sizes below zero.

        Raises:
            ConfigError: With the flag, the value and the fix.
        """
        for flag, size_bytes in (("--offload-window", self.window_bytes), ("--offload-prefetch", self.prefetch_bytes)):
            if check_bytes(size_bytes, name=flag) < 0:
                raise ConfigError(f"{flag} {size_bytes} is below 0 bytes. Give 0 (nothing in advance) or a size like 512MiB.")

    def must_wait(self, *, in_flight_bytes: int) -> bool:
        """Return whether compute has to wait for the oldest copy to the host before it goes on."""
        return in_flight_bytes > self.window_bytes

    def may_begin_prefetch(self, *, ahead_bytes: int) -> bool:
        """Return whether it is time to look for groups to bring back.

        Not while half of what may be ahead is: several groups at once cost the host less than one after the other.

        Args:
            ahead_bytes: As for `may_prefetch`.
        """
        return 2 * ahead_bytes <= self.prefetch_bytes

    def may_prefetch(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may start its way back before backward asks for it.

        Where nothing is ahead one group may, however large: else it would always be waited for, and so would those behind it.

        Args:
            ahead_bytes: Bytes that are back on the device, or on the way, for groups that backward has not asked for.
            group_bytes: Bytes of the group in question.
        """
        return ahead_bytes + group_bytes <= self.prefetch_bytes or (ahead_bytes == 0 < self.prefetch_bytes)

    def may_prefetch_early(self, *, ahead_bytes: int, group_bytes: int, let_go_bytes: int) -> bool:
        """Return whether a group may start its way back while backward is in layers of which nothing left.

        It must not take more than backward has let go of there: else the device would hold more than where forward ended, and
        that is where most steps have their peak.

        Args:
            ahead_bytes: As for `may_prefetch`.
            group_bytes: As for `may_prefetch`.
            let_go_bytes: Bytes that stayed on the device, and that backward is through with.
        """
        may_prefetch = self.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=group_bytes)
        return may_prefetch and ahead_bytes + group_bytes <= let_go_bytes
