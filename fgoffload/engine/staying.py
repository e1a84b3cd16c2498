"""Remembers storages that always stay on the device, since they are marked or referenced outside of autograd."""

from fgoffload.engine.identity import StorageRef
from fgoffload.engine.stats import KeptReason
from fgoffload.plan import Site


class StayingStorages:
    """Storages that are never offloaded, identified by address without a strong reference."""

    def __init__(self) -> None:
        self._reasons: dict[int, tuple[StorageRef, KeptReason]] = {}
        self._limit = 1024
        """Number of entries above which freed ones are dropped."""
        self._outlived: list[StorageRef] = []
        """Offloaded storages that autograd has dropped but that are still alive."""

    def find_reason(self, key: int) -> KeptReason | None:
        """Return why the storage with `key` stays on the device, or None."""
        entry = self._reasons.get(key)
        return None if entry is None else entry[1]

    def add(self, storage: StorageRef, reason: KeptReason) -> None:
        """Keep `storage` on the device for `reason` from now on."""
        if storage.is_freed:
            return
        self._reasons[storage.key] = (storage, reason)
        if len(self._reasons) > self._limit:
            self._reasons = {key: entry for key, entry in self._reasons.items() if not entry[0].is_freed}
            self._limit = max(1024, 2 * len(self._reasons))

    def suspect(self, storage: StorageRef) -> None:
        """Note that `storage` was offloaded and dropped by autograd, but is still alive."""
        self._outlived.append(storage)

    @property
    def has_suspects(self) -> bool:
        """Whether there are suspects to check in `add_suspects`."""
        return bool(self._outlived)

    def add_suspects(self, *, are_copies_done: bool) -> None:
        """Keep suspects that are still alive on the device from now on.

        Whatever references one, such as a buffer or a table that all layers share, will reference it the next time too.

        Args:
            are_copies_done: Whether no copy to the host is in flight. A copy in flight may itself reference a suspect.
        """
        self._outlived = [storage for storage in self._outlived if not storage.is_freed]
        if are_copies_done:
            for storage in self._outlived:
                self.add(storage, KeptReason.REFERENCED)
            self._outlived.clear()


Spot = tuple[Site, int, int]
"""Position of a save: the site, the number of earlier saves in the region, and the bytes of the storage."""


class ReferencedSpots:
    """Spots whose storages are referenced elsewhere each time, although each step has a new storage.

    A quantized linear, for example, saves tensors that its own state references too. They are new storages in each step.
    """

    ENOUGH = 2
    """Number of consecutive storages still referenced elsewhere at their reload. A single one may be an inspected value."""
    PAUSE = 64
    """Number of saves to keep before one is offloaded again, to check whether it is still referenced elsewhere."""

    def __init__(self) -> None:
        self._held: dict[Spot, int] = {}
        """Number of consecutive storages that were referenced elsewhere, plus those kept since."""

    def stays(self, spot: Spot) -> bool:
        """Return whether to keep the storage that is saved at `spot` on the device."""
        count = self._held.get(spot, 0)
        if count < self.ENOUGH:
            return False
        self._held[spot] = count + 1
        if count >= self.ENOUGH + self.PAUSE:
            self._held[spot] = self.ENOUGH - 1
            return False
        return True

    def note(self, spot: Spot, *, is_held: bool) -> None:
        """Note whether a storage saved at `spot` was still referenced elsewhere when it was reloaded."""
        if is_held:
            self._held[spot] = self._held.get(spot, 0) + 1
        else:
            self._held.pop(spot, None)
