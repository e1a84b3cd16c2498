"""Maps each saved tensor to its saved storage, or to the reason why it stays on the device.

A storage is offloaded once, however many saves and groups share it. The registry identifies a storage by its address, which a
saved storage reserves. Another version of the bytes has its own saved storage, and so do bytes outside the offloaded range.

[Note: Writes that torch does not count]
Autograd detects a write to a saved tensor by its version. A Triton kernel, a collective or NumPy may write without changing the
version, and plain torch then passes the current bytes to backward. For example, Liger's cross entropy overwrites the logits
with their gradient and saves them again. So if a storage is saved again at the same version after its copy to the host has
begun, the engine compares its bytes with the copy. It does so only for the first saves at each pair of places (of the first
and the repeated save). If the bytes differ, all saves use the current bytes, now and in later saves at this pair. Otherwise,
all saves share the copy. A storage that is not saved again after the write is reloaded as copied.
"""

import weakref
from collections.abc import Iterable

import torch

from fgoffload.engine.copies import Transfers
from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View, gather, get_byte_range
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.identity import Contents, StorageRef, get_key, identify
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.memory_tiers import SavedState
from fgoffload.plan import Site

COMPARISONS = 8
"""Number of repeated saves to compare per pair of places. A comparison blocks the host and copies bytes to the device."""


class SavedRegistry:
    """Saved storages of an engine. Its methods are called under the engine's lock."""

    def __init__(self, device: Device, transfers: Transfers, rules: KeepRules) -> None:
        self._device = device
        self._transfers = transfers
        self._rules = rules
        self._excluded: dict[int, tuple[StorageRef, KeptReason]] = {}
        """Storages that are never offloaded, with the reasons, keyed by storage key."""
        self._limit = 1024
        """Number of entries in `_excluded` above which freed storages are removed."""
        self._outlived: list[StorageRef] = []
        """Offloaded storages that autograd has released but that are still alive."""
        self._comparisons: dict[tuple[Site | None, Site | None], int] = {}
        """Number of comparisons for each pair of places. See [Note: Writes that torch does not count]."""
        self._rewriting: set[tuple[Site | None, Site | None]] = set()
        """Pairs of places: a storage saved at the first is overwritten before it is saved again at the second."""
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}
        self._watched = TagStats()
        """Statistics of saves that belong to no group."""

    def is_excluded(self, key: int) -> bool:
        """Return whether the storage with `key` is never offloaded."""
        return key in self._excluded

    def find_reason_to_keep(self, tensor: torch.Tensor, lane: Lane | None = None) -> KeptReason | None:
        """Return why `tensor` stays on the device, or None. A filtered storage stays for the rest of `lane`."""
        reason = self._rules.find_unsupported_kind(tensor)
        if reason is None:
            key = get_key(tensor)
            if key in self._excluded:
                reason = self._excluded[key][1]
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
            saved.contents == contents and saved.holds(view) and saved.shares_counter_with(tensor, view)
        ):
            saved = None
        if saved is not None and saved.lane is not lane.place and tensor.is_leaf and not tensor.requires_grad:
            # A lookup table or a module's buffer stays alive, so another offload would free nothing. An earlier copy may be
            # stale, because ops such as batch norm change their buffers without changing the version.
            self._exclude(saved.storage, KeptReason.REFERENCED)
            return KeptReason.REFERENCED
        stream = self._device.current_stream()
        place, stats = (lane.place, self._watched) if group is None else (group.place, group.stats)
        if saved is not None and saved.is_ordered_on(stream):
            saved.streams.add(stream)
            if saved.state is not SavedState.RESIDENT:
                self._check_rewrite(saved, tensor, place)
            return saved
        added = SavedStorage(self._transfers, tensor, contents, place, stats, owner=stream)
        added.lane = lane.place
        if saved is not None:
            added.streams |= saved.streams
        self._saved[key] = weakref.ref(added)
        return added

    def _check_rewrite(self, saved: SavedStorage, tensor: torch.Tensor, place: Place) -> None:
        """Make `saved` use its storage's current bytes if they were overwritten after the copy.

        `saved` is offloaded or in flight to the host. `tensor`, which has the same storage, is being saved at `place`.

        Streams:
            For the first `COMPARISONS` saves at a pair of places, the host blocks until the copy to the host and the work
            queued on the current stream are done.
        """
        pair = (saved.place.site, place.site)
        if pair not in self._rewriting:
            count = self._comparisons.get(pair, 0)
            if count < COMPARISONS and not self._device.is_capturing():  # the steps before the capture made the comparisons
                self._comparisons[pair] = count + 1
                if not self._is_equal(saved, tensor):
                    self._rewriting.add(pair)
        if pair in self._rewriting:
            saved.stats.recalled_bytes += saved.moved_bytes
            self._transfers.drop_reloaded(saved)
            saved.use_storage_of(tensor)

    def _is_equal(self, saved: SavedStorage, tensor: torch.Tensor) -> bool:
        if saved.block is None or saved.block.parts[0].is_meta:
            return True  # an estimate of savings copies nothing
        byte_range = get_byte_range(tensor, start=saved.start, end=saved.end)
        if saved.gathered:
            # The padding between the packed views is arbitrary, so we use the copy's padding.
            if saved.d2h_done is not None:
                self._device.synchronize(saved.d2h_done)
            byte_range = torch.cat(saved.block.parts).to(tensor.device)
            gather(saved.gathered, tensor, byte_range)
        ranges = torch.split(byte_range, [part.numel() for part in saved.block.parts])
        return all(
            self._device.is_equal(part, now, after=saved.d2h_done) for part, now in zip(saved.block.parts, ranges, strict=True)
        )

    def make(self, tensor: torch.Tensor, contents: Contents, place: Place) -> SavedStorage:
        """Return an unregistered saved storage for `tensor`, which is being saved on the current stream."""
        return SavedStorage(self._transfers, tensor, contents, place, self._watched, owner=self._device.current_stream())

    def forget_dropped(self) -> None:
        """Remove storages that autograd has released. Released storages that are still alive are never offloaded again."""
        dropped = self._transfers.dropped
        while dropped:
            storage, was_offloaded = dropped.popleft()
            key = storage.key
            reference = self._saved.get(key)
            if reference is not None and reference() is None:
                del self._saved[key]
            if was_offloaded and not storage.is_freed:
                self._outlived.append(storage)
        if self._outlived:
            self._transfers.poll()
            self._outlived = [storage for storage in self._outlived if not storage.is_freed]
            if not self._transfers.in_flight_bytes:  # a copy in flight may hold the last reference
                # The storage, such as a buffer or a table that all layers use, will also be alive in the next step.
                for storage in self._outlived:
                    self._exclude(storage, KeptReason.REFERENCED)
                self._outlived.clear()

    def exclude_if_referenced(self, saved: SavedStorage) -> None:
        """Exclude the storage of `saved` from offload if something else still references it."""
        if not saved.storage.is_freed:
            saved.stats.held_elsewhere_bytes += saved.size_bytes
            self._exclude(saved.storage, KeptReason.REFERENCED)

    def mark(self, tensors: Iterable[torch.Tensor], reason: KeptReason) -> None:
        """Exclude the storages of `tensors` from offload for `reason`, until the storages are freed."""
        for tensor in tensors:
            entry = self._excluded.get(get_key(tensor))
            if entry is None or entry[1] is not reason:
                self._exclude(StorageRef(tensor), reason)

    def _exclude(self, storage: StorageRef, reason: KeptReason) -> None:
        if storage.is_freed:
            return
        self._excluded[storage.key] = (storage, reason)
        if len(self._excluded) > self._limit:
            self._excluded = {key: entry for key, entry in self._excluded.items() if not entry[0].is_freed}
            self._limit = max(1024, 2 * len(self._excluded))
