"""Finds the saved storage of each saved tensor, or the reason why the tensor stays on the device.

A storage is offloaded once, however many saves and groups share it. It is identified by its address, which a saved storage
keeps in use. Another version of its bytes, or bytes outside of the offloaded range, get their own saved storage.

[Note: Writes that torch does not count]
Autograd detects a write to a saved tensor by its version. A Triton kernel, a collective or NumPy may write without changing
the version, and plain torch then gives backward the current bytes. Liger's cross entropy, for example, overwrites the logits
with their gradient and saves them again. So the first re-saves at each pair of places, at an unchanged version and after the
copy to the host has begun, are compared with the copied bytes. If they differ, all saves of the storage get its current bytes,
now and at later re-saves of this pair. If they agree, one copy serves all saves, and the comparisons end. A storage that is not
saved again after the write is reloaded as copied.
"""

import weakref
from collections.abc import Iterable

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View, gather, get_byte_range
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.identity import Contents, StorageRef, get_key, identify
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.engine.transfers import Transfers
from fgoffload.plan import Site
from fgoffload.transfer_schedule import SavedState

COMPARISONS = 8
"""Number of re-saves to compare for a pair of places. A comparison blocks the host and copies the tensor over the link."""


class SavedRegistry:
    """Saved storages of an engine. Called under the engine's lock."""

    def __init__(self, device: Device, transfers: Transfers, rules: KeepRules) -> None:
        self._device = device
        self._transfers = transfers
        self._rules = rules
        self._staying: dict[int, tuple[StorageRef, KeptReason]] = {}
        """Storages that are never offloaded, by key."""
        self._limit = 1024
        """Number of entries above which freed storages are removed."""
        self._outlived: list[StorageRef] = []
        """Offloaded storages that autograd has released but that are still alive."""
        self._comparisons: dict[tuple[Site | None, Site | None], int] = {}
        """Number of compared re-saves, by the pair of places. See [Note: Writes that torch does not count]."""
        self._rewriting: set[tuple[Site | None, Site | None]] = set()
        """Pairs of places between which a storage is overwritten."""
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}
        self._watched = TagStats()
        """Statistics of saves between regions that belong to no group."""

    def stays(self, key: int) -> bool:
        """Return whether the storage with `key` stays on the device."""
        return key in self._staying

    def find_reason_to_keep(self, tensor: torch.Tensor, lane: Lane | None = None) -> KeptReason | None:
        """Return why `tensor` stays on the device, or None. Within `lane`, the filter keeps a storage as a whole."""
        reason = self._rules.find_kind_to_keep(tensor)
        if reason is None:
            key = get_key(tensor)
            if key in self._staying:
                reason = self._staying[key][1]
            elif (lane is not None and key in lane.filtered) or self._rules.is_filtered(tensor):
                reason = KeptReason.FILTERED
                if lane is not None:
                    lane.filtered.add(key)
        return reason

    def join(self, tensor: torch.Tensor, view: View, *, lane: Lane, group: Group | None) -> SavedStorage | KeptReason:
        """Return the existing or new saved storage of `tensor`, or the reason why it stays on the device."""
        key, contents = identify(tensor)
        reference = self._saved.get(key)
        saved = None if reference is None else reference()
        if saved is not None and not (
            saved.contents == contents and saved.holds(view) and saved.counts_changes_of(tensor, view)
        ):
            saved = None
        if saved is not None and saved.lane is not lane.place and tensor.is_leaf and not tensor.requires_grad:
            # A table or a buffer, which stays alive, so another offload would free nothing. An earlier copy must not be used,
            # since ops such as batch norm change their buffers at the same version.
            self._keep(saved.storage, KeptReason.REFERENCED)
            return KeptReason.REFERENCED
        stream = self._device.current_stream()
        place, stats = (lane.place, self._watched) if group is None else (group.place, group.stats)
        if saved is not None and saved.is_ordered_on(stream):
            saved.streams.add(stream)
            if saved.state is not SavedState.RESIDENT:
                self._follow_rewrite(saved, tensor, place)
            return saved
        added = SavedStorage(self._transfers, tensor, contents, place, stats, owner=stream)
        added.lane = lane.place
        if saved is not None:
            added.streams |= saved.streams
        self._saved[key] = weakref.ref(added)
        return added

    def _follow_rewrite(self, saved: SavedStorage, tensor: torch.Tensor, place: Place) -> None:
        """Make `saved` use its storage's current bytes if they were overwritten after the copy.

        `saved` is offloaded or in flight to the host, and `tensor`, on the same storage, is now saved at `place`.

        Streams:
            For the first re-saves at a pair of places, the host blocks until the copy to the host and the work queued on the
            current stream are done.
        """
        pair = (saved.place.site, place.site)
        if pair not in self._rewriting:
            count = self._comparisons.get(pair, 0)
            if count < COMPARISONS and not self._device.is_capturing():  # steps before the capture did the comparisons
                self._comparisons[pair] = count + 1
                if not self._is_equal(saved, tensor):
                    self._rewriting.add(pair)
        if pair in self._rewriting:
            saved.stats.recalled_bytes += saved.moved_bytes
            self._transfers.drop_reloaded(saved)
            saved.return_to(tensor)

    def _is_equal(self, saved: SavedStorage, tensor: torch.Tensor) -> bool:
        if saved.block is None or saved.block.parts[0].is_meta:
            return True  # nothing was copied, as in an estimate
        byte_range = get_byte_range(tensor, start=saved.start, end=saved.end)
        if saved.gathered:
            # The padding between the views is arbitrary, so it comes from the copy.
            if saved.d2h_done is not None:
                self._device.synchronize(saved.d2h_done)
            byte_range = torch.cat(saved.block.parts).to(tensor.device)
            gather(saved.gathered, tensor, byte_range)
        ranges = torch.split(byte_range, [part.numel() for part in saved.block.parts])
        return all(
            self._device.is_equal(part, now, after=saved.d2h_done) for part, now in zip(saved.block.parts, ranges, strict=True)
        )

    def make(self, tensor: torch.Tensor, contents: Contents, place: Place) -> SavedStorage:
        """Return a saved storage for `tensor`, saved on the current stream, without registering it."""
        return SavedStorage(self._transfers, tensor, contents, place, self._watched, owner=self._device.current_stream())

    def forget_dropped(self) -> None:
        """Forget storages that autograd released. Storages still alive stay on the device from now on."""
        dropped = self._transfers.dropped
        while dropped:
            storage, has_left = dropped.popleft()
            key = storage.key
            reference = self._saved.get(key)
            if reference is not None and reference() is None:
                del self._saved[key]
            if has_left and not storage.is_freed:
                self._outlived.append(storage)
        if self._outlived:
            self._transfers.poll()
            self._outlived = [storage for storage in self._outlived if not storage.is_freed]
            if not self._transfers.in_flight_bytes:  # a copy in flight may reference one
                # The other reference, such as a buffer or a table of all layers, will exist in the next step too.
                for storage in self._outlived:
                    self._keep(storage, KeptReason.REFERENCED)
                self._outlived.clear()

    def note_reload(self, saved: SavedStorage) -> None:
        """Keep the storage of `saved` on the device from now on if something else still references it."""
        if not saved.storage.is_freed:
            saved.stats.held_elsewhere_bytes += saved.size_bytes
            self._keep(saved.storage, KeptReason.REFERENCED)

    def mark(self, tensors: Iterable[torch.Tensor], reason: KeptReason) -> None:
        """Keep the storages of `tensors` on the device as long as they live, and report `reason`."""
        for tensor in tensors:
            entry = self._staying.get(get_key(tensor))
            if entry is None or entry[1] is not reason:
                self._keep(StorageRef(tensor), reason)

    def _keep(self, storage: StorageRef, reason: KeptReason) -> None:
        if storage.is_freed:
            return
        self._staying[storage.key] = (storage, reason)
        if len(self._staying) > self._limit:
            self._staying = {key: entry for key, entry in self._staying.items() if not entry[0].is_freed}
            self._limit = max(1024, 2 * len(self._staying))
