"""Storages that always stay on the device: marked, or referenced by something else than autograd."""

from fgoffload.engine.identity import StorageRef
from fgoffload.engine.stats import KeptReason
from fgoffload.plan import Site


class StayingStorages:
    """Storages that are never moved, identified by address without a reference."""

    def __init__(self) -> None:
        self._reasons: dict[int, tuple[StorageRef, KeptReason]] = {}
        self._limit = 1024
        """Entries at which the freed ones are dropped."""
        self._outlived: list[StorageRef] = []
        """Offloaded storages that autograd has dropped but that are still alive."""

    def find_reason(self, key: int) -> KeptReason | None:
        """Return why the storage with `key` stays on the device, or None."""
        entry = self._reasons.get(key)
        return None if entry is None else entry[1]

    def add(self, storage: StorageRef, reason: KeptReason) -> None:
        """Let `storage` stay for `reason` from now on."""
        if storage.is_freed:
            return
        self._reasons[storage.key] = (storage, reason)
        if len(self._reasons) > self._limit:
            self._reasons = {key: entry for key, entry in self._reasons.items() if not entry[0].is_freed}
            self._limit = max(1024, 2 * len(self._reasons))

    def suspect(self, storage: StorageRef) -> None:
        """Take note that `storage` left, that autograd no longer wants it, and that it is alive."""
        self._outlived.append(storage)

    @property
    def has_suspects(self) -> bool:
        """Whether `add_suspects` has something to look at."""
        return bool(self._outlived)

    def add_suspects(self, *, are_copies_done: bool) -> None:
        """Let those suspects stay that are still alive.

        Whatever holds one, a buffer or a table that all layers share, will hold it the next time too.

        Args:
            are_copies_done: Whether no copy to the host is under way. One that is may be what holds a suspect.
        """
        self._outlived = [storage for storage in self._outlived if not storage.is_freed]
        if are_copies_done:
            for storage in self._outlived:
                self.add(storage, KeptReason.REFERENCED)
            self._outlived.clear()


Spot = tuple[Site, int, int]
"""Where a storage is saved: the site, the saves of the region before this one, and the bytes of the storage."""


class ReferencedSpots:
    """Spots whose storages something else holds each time, though each time it is another storage.

    A quantized linear saves tensors that its own state holds too, new ones in each step: by the storage nothing is learned.
    """

    ENOUGH = 2
    """Storages in a row that were held when they came back: one alone may be a value that somebody looked at."""
    PAUSE = 64
    """Saves that stay before one leaves again, to see whether it is held still."""

    def __init__(self) -> None:
        self._held: dict[Spot, int] = {}
        """How many storages in a row were held, and how many stayed since."""

    def stays(self, spot: Spot) -> bool:
        """Return whether the storage that is saved at `spot` now stays."""
        count = self._held.get(spot, 0)
        if count < self.ENOUGH:
            return False
        self._held[spot] = count + 1
        if count >= self.ENOUGH + self.PAUSE:
            self._held[spot] = self.ENOUGH - 1
            return False
        return True

    def note(self, spot: Spot, *, is_held: bool) -> None:
        """A storage that was saved at `spot` has come back, and was held by something else all the while, or was not."""
        if is_held:
            self._held[spot] = self._held.get(spot, 0) + 1
        else:
            self._held.pop(spot, None)
