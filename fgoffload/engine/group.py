"""Groups of saved tensors, and the lanes that order them."""

import weakref
from collections.abc import Iterable

import torch

from fgoffload.engine.identity import get_key, has_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.memory_tiers import SavedState
from fgoffload.plan import Site
from fgoffload.transfer_schedule import GroupState, ScheduledGroup, ScheduledLane


class Group(ScheduledGroup):
    """Tensors that one run of a site saves for one microbatch. They are offloaded and reloaded together."""

    __slots__ = (
        "__weakref__", "_kept", "_passed", "_saved", "filtered", "moved_bytes", "passed_bytes", "passed_tensors", "place",
        "saved_tensors", "stats",
    )  # fmt: skip

    def __init__(self, place: Place, stats: TagStats, *, position: int) -> None:
        super().__init__(position)
        self.place = place
        self.stats = stats
        self.moved_bytes = 0
        self._kept: dict[int, dict[tuple[int, int], int]] = {}
        """Bytes that `count_kept` has counted, keyed by storage key, then by the tensor's address and size."""
        self.filtered: set[int] = set()
        """The lane's `filtered` set."""
        self.saved_tensors = 0
        """Number of tensors saved with `OffloadEngine.save`."""
        self.passed_tensors = 0
        """Number of saved tensors that bypass `OffloadEngine.save`, because they are never offloaded."""
        self.passed_bytes = 0
        """Bytes of the storages that `count_small` has counted."""
        self._passed: set[int] = set()
        """Keys of the storages that `count_small` has counted. Their handles keep the storages alive."""
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}

    def add(self, saved: SavedStorage) -> None:
        """Add `saved` to the storages that this group offloads, unless the group has ended."""
        if self.state is GroupState.SAVING:
            self._saved[id(saved)] = weakref.ref(saved)  # weak reference, see [Note: Ownership]

    def count_kept(self, tensor: torch.Tensor, reason: KeptReason) -> None:
        """Count the bytes of `tensor`, which stays on the device. Tensors count once, and a storage for at most its size."""
        size_bytes = tensor.numel() * tensor.element_size()
        if type(tensor) is torch.Tensor and has_bytes(tensor):
            kept = self._kept.setdefault(get_key(tensor), {})
            where = (tensor.data_ptr(), size_bytes)
            if where in kept:
                return
            size_bytes = min(size_bytes, tensor.untyped_storage().nbytes() - sum(kept.values()))
            kept[where] = size_bytes
        self.stats.add_kept(reason, size_bytes)

    def count_small(self, tensor: torch.Tensor) -> None:
        """Count `tensor`, whose whole storage is too small to offload. The bytes of a storage count once."""
        self.passed_tensors += 1
        key = get_key(tensor)
        if key not in self._passed:
            self._passed.add(key)
            self.passed_bytes += tensor.untyped_storage().nbytes()

    def submit_living(self) -> list[SavedStorage]:
        """Submit the group, and return its saved storages that autograd still needs."""
        self.submit()
        living = self.list_saved()
        self.stats.dropped_storages += len(self._saved) - len(living)
        for saved in living:
            saved.uses += 1
        return living

    def spend(self) -> None:
        """Record that backward has finished the group, so that the engine may drop its reloaded tensors."""
        if self.state is GroupState.SUBMITTED:
            for saved in self.list_saved():
                saved.uses -= 1
        super().spend()

    def list_saved(self, *states: SavedState) -> list[SavedStorage]:
        """Return the saved storages that autograd still needs, in save order. If `states` are given, filter by them."""
        living = [saved for reference in self._saved.values() if (saved := reference()) is not None]
        return [saved for saved in living if saved.state in states] if states else living


class Lane(ScheduledLane[Group, SavedStorage]):
    """Groups of one microbatch in one model chunk, in forward order."""

    __slots__ = ("__weakref__", "_name", "filtered", "number", "place")

    def __init__(self, *, chunk: int, microbatch: int) -> None:
        super().__init__()
        self._name = f"mb={microbatch}" if chunk == 0 else f"mb={microbatch} chunk={chunk}"
        self.place = Place(None, self._name)
        """Place of the lane: its microbatch, and its chunk unless it is chunk 0."""
        self.number = -1
        """Number of earlier forwards in the step, set by `PassOrder`."""
        self.filtered: set[int] = set()
        """Keys of storages with a tensor that the user's filter kept. Offloading their other tensors would free nothing."""

    def add(self, site: Site, stats: TagStats) -> Group:
        """Append a new group of `site` and return it. `stats` are the statistics of its tag."""
        group = Group(Place(site, self._name), stats, position=len(self.groups))
        group.filtered = self.filtered
        self.open(group)
        return group

    def list_remaining(self, group: int) -> list[SavedStorage]:
        """Return a group's storages that are on the host or in flight to it, and that autograd still needs."""
        return self.groups[group].list_saved(SavedState.OFFLOADING, SavedState.OFFLOADED)

    def is_offloaded(self, saved: SavedStorage) -> bool:
        """Return whether `saved` is only on the host."""
        return saved.state is SavedState.OFFLOADED

    def count_bytes(self, remaining: Iterable[SavedStorage]) -> int:
        """Return the number of bytes to copy for the storages in `remaining`."""
        return sum([saved.moved_bytes for saved in remaining])
