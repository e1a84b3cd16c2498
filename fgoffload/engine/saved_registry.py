"""Finds the saved storage of each saved tensor, or the reason why the tensor stays on the device.

A storage is offloaded once, however many saves and groups share it. It is identified by its address, which a saved storage
keeps in use. Another version of the bytes, or bytes outside of the offloaded range, are a separate saved storage.
"""

import weakref
from collections.abc import Iterable

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.identity import Contents, StorageRef, get_key, identify
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.place import Place
from fgoffload.engine.rewrites import Rewrites
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.engine.staying import ReferencedSpots, StayingStorages
from fgoffload.engine.transfers import Transfers
from fgoffload.transfer_schedule import SavedState


class SavedRegistry:
    """Saved storages of an engine. Called under the engine's lock.

    Args:
        device: The engine's device.
        transfers: Copies storages, and lists the storages that autograd dropped.
        rules: Kinds and sizes of tensors that stay on the device.
    """

    def __init__(self, device: Device, transfers: Transfers, rules: KeepRules) -> None:
        self._device = device
        self._transfers = transfers
        self._rules = rules
        self._staying = StayingStorages()
        self._referenced_spots = ReferencedSpots()
        self._rewrites = Rewrites(device, transfers)
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}
        self._watched = TagStats()
        """Statistics of saves between regions that belong to no group."""

    def stays(self, key: int) -> bool:
        """Return whether the storage with `key` stays on the device."""
        return self._staying.find_reason(key) is not None

    def find_reason_to_keep(self, tensor: torch.Tensor, lane: Lane | None = None) -> KeptReason | None:
        """Return why `tensor` stays on the device, or None. A storage that the filter kept in `lane` is not asked again."""
        reason = self._rules.find_kind_to_keep(tensor)
        if reason is None:
            key = get_key(tensor)
            reason = self._staying.find_reason(key)
            if reason is None and ((lane is not None and key in lane.filtered) or self._rules.is_filtered(tensor)):
                reason = KeptReason.FILTERED
                if lane is not None:
                    lane.filtered.add(key)
        return reason

    def join(self, tensor: torch.Tensor, view: View, *, lane: Lane, group: Group | None) -> SavedStorage | KeptReason:
        """Return the saved storage that `tensor` belongs to, an existing or a new one, or why it stays on the device."""
        key, contents = identify(tensor)
        reference = self._saved.get(key)
        saved = None if reference is None else reference()
        if saved is not None and not (
            saved.contents == contents and saved.holds(view) and saved.counts_changes_of(tensor, view)
        ):
            saved = None
        if saved is not None and saved.lane is not lane.place and tensor.is_leaf and not tensor.requires_grad:
            # A table or a buffer, which stays alive. Some ops change these at the same version, as batch norm does with its
            # running statistics. So an earlier copy must not be used, and offloading it again would free nothing.
            self._staying.add(saved.storage, KeptReason.REFERENCED)
            return KeptReason.REFERENCED
        spot = None if group is None or group.site is None else (group.site, group.saved_tensors, contents.nbytes)
        if saved is None and spot is not None and self._referenced_spots.stays(spot):
            return KeptReason.REFERENCED
        stream = self._device.current_stream()
        place, stats = (lane.place, self._watched) if group is None else (group.place, group.stats)
        if saved is not None and saved.is_ordered_on(stream):
            saved.streams.add(stream)
            if saved.state is not SavedState.RESIDENT:
                self._rewrites.follow(saved, tensor, place)
            return saved
        added = SavedStorage(self._transfers, tensor, contents, place, stats, owner=stream)
        added.lane, added.spot = lane.place, spot
        if saved is not None:
            added.streams |= saved.streams
        self._saved[key] = weakref.ref(added)
        return added

    def make(self, tensor: torch.Tensor, contents: Contents, place: Place) -> SavedStorage:
        """Return the storage of `tensor`, saved on the current stream, without registering it."""
        return SavedStorage(self._transfers, tensor, contents, place, self._watched, owner=self._device.current_stream())

    def forget_dropped(self) -> None:
        """Forget storages that autograd dropped. Those still alive are referenced elsewhere, so they stay from now on."""
        dropped = self._transfers.dropped
        while dropped:
            storage, has_left = dropped.popleft()
            key = storage.key
            reference = self._saved.get(key)
            if reference is not None and reference() is None:
                del self._saved[key]
            if has_left and not storage.is_freed:
                self._staying.suspect(storage)
        if self._staying.has_suspects:
            self._transfers.poll()
            self._staying.add_suspects(are_copies_done=self._transfers.in_flight_bytes == 0)

    def note_reload(self, saved: SavedStorage) -> None:
        """Remember a storage and its spot if something else referenced it while it was on the host."""
        is_held = not saved.storage.is_freed
        if saved.spot is not None:
            self._referenced_spots.note(saved.spot, is_held=is_held)
        if is_held:
            saved.stats.held_elsewhere_bytes += saved.size_bytes
            self._staying.add(saved.storage, KeptReason.REFERENCED)

    def mark(self, tensors: Iterable[torch.Tensor], reason: KeptReason) -> None:
        """Keep the storages of `tensors` on the device for `reason`, as long as they live."""
        for tensor in tensors:
            if self._staying.find_reason(get_key(tensor)) is not reason:
                self._staying.add(StorageRef(tensor), reason)
