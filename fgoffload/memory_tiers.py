"""Memory tiers of saved bytes: GPU memory and host memory. The engine, the schedule and the simulator share this enum."""

import enum


class SavedState(enum.Enum):
    """Location of saved bytes, including copies in progress."""

    RESIDENT = enum.auto()  # on the device only: no copy was queued, or its offload was cancelled
    OFFLOADING = enum.auto()  # still on the device; the copy to the host may be running
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host and in a device buffer; the copy to the buffer may be running
    FREED = enum.auto()  # nowhere, because backward no longer needs them; only in the simulator

    __hash__ = object.__hash__
    """Identity hash, several times faster than `Enum`'s own. Safe because members are singletons."""
