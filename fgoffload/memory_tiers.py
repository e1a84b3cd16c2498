"""Memory tiers of saved bytes: GPU memory and pinned host memory. The engine, the schedule and the simulator share them."""

import enum


class SavedState(enum.Enum):
    """Tier of saved bytes, and copies between tiers."""

    RESIDENT = enum.auto()  # on the device only: not submitted, kept, or cancelled in time
    OFFLOADING = enum.auto()  # still on the device; the copy to the host may be running
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host and in a device buffer; the copy to the buffer may be running
    FREED = enum.auto()  # nowhere, since backward no longer needs them; only in the simulator

    __hash__ = object.__hash__
    """Identity hash, several times faster than `Enum`'s own. Safe because members are singletons."""
