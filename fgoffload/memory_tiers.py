"""Memory tiers of saved bytes: GPU memory and host memory. The engine, the schedule and the simulator use the same states."""

import enum


class SavedState(enum.Enum):
    """Memory tier that contains saved bytes, and whether a copy to the other tier may be running."""

    RESIDENT = enum.auto()  # on the device only: not offloaded yet, kept, or its offload was cancelled
    OFFLOADING = enum.auto()  # still on the device; the copy to the host may be running
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host and in a device buffer; the copy to the buffer may be running
    FREED = enum.auto()  # released, because backward no longer needs them; used only in the simulator

    __hash__ = object.__hash__
    """Identity hash, several times faster than `Enum`'s own. Safe because members are singletons."""
