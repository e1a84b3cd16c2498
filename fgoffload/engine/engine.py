"""The engine: decides what is offloaded and when, and serves autograd.

It handles tensors, groups, lanes and a device, and knows no framework. An integration constructs an engine, holds it and opens
regions; autograd calls it through their hooks. `keep_rules.py` decides which tensors stay on the device,
`fgoffload.transfer_schedule` when bytes are reloaded, and `transfers.py` copies and orders streams.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from fgoffload.engine.capture import Capture
from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View, get_view
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.handles import (
    FollowedHandle,
    Handle,
    KeptHandle,
    WrappedHandle,
    find_local_tensor,
    keep_tensor,
    wrap_like,
)
from fgoffload.engine.host_arena import MIN_PART_BYTES, HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.host_budget import HostBudget, get_process_budget
from fgoffload.engine.identity import Contents, StorageRef, get_key, identify
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.region import Following, Region, Saving, add_mark, is_engine_hook, is_in_backward, is_inert
from fgoffload.engine.reloads import Reloads
from fgoffload.engine.rewrites import Rewrites
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.staging import Staging
from fgoffload.engine.stats import Counters, KeptReason, StepStats, TagStats
from fgoffload.engine.staying import ReferencedSpots, Spot, StayingStorages
from fgoffload.engine.timing import StopWatch
from fgoffload.engine.torch_internals import wrap_internals
from fgoffload.engine.transfers import Transfers
from fgoffload.errors import StateError
from fgoffload.plan import Site
from fgoffload.transfer_schedule import GroupState, SavedState, TransferPolicy, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Offloads and reloads what autograd saves.

    Args:
        device: Where the tensors live.
        policy: Window and prefetch.
        min_offloaded_numel: Elements. Storages of which fewer are saved stay on the device.
        min_offloaded_bytes: The same in bytes; both must be reached.
        keep: The user's filter: a saved tensor for which it returns true stays on the device.
        host_budget_bytes: Most host memory. Engines of a process with None share one budget.
        is_timed: Measure copies and waits, with a few more events for each group; `finish_step` waits for them.
    """

    def __init__(
        self,
        *,
        device: Device,
        policy: TransferPolicy | None = None,
        min_offloaded_numel: int = 0,
        min_offloaded_bytes: int = 0,
        keep: Callable[[torch.Tensor], bool] | None = None,
        host_budget_bytes: int | None = None,
        is_timed: bool = False,
    ) -> None:
        wrap_internals(is_engine_hook)
        self.device = device
        self._schedule = TransferSchedule(policy or TransferPolicy())
        self.most_in_flight: int | None = None
        """How many groups of each tag may be in flight to the host before compute waits, besides the window; None for any."""
        self._rules = KeepRules(
            device, min_offloaded_numel=min_offloaded_numel, min_offloaded_bytes=min_offloaded_bytes, keep=keep
        )
        self.is_always_too_small = self._rules.is_always_too_small
        """Whether a tensor stays on the device in any case, so that `save` is not needed."""
        self.arena = HostArena(
            device,
            budget=get_process_budget() if host_budget_bytes is None else HostBudget(host_budget_bytes),
            min_part_bytes=MIN_PART_BYTES,
        )
        # Backward runs on autograd's own thread, and two models may train on two threads.
        self._lock = threading.RLock()
        # Before the transfers: a dropped engine releases its host memory, after its copies, before its buffers.
        self.staging = Staging(device, self.arena, self._lock)
        """Offload of captured graphs."""
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}
        self._staying = StayingStorages()
        # Weakly: what a forward held that raised since, or whose graph was dropped, is nobody's any more.
        self._held: list[weakref.ref[Group]] = []
        self.observers: list[ActivationLedger] = []
        """Are told of what is saved and taken, and of each device buffer."""
        self._watch = StopWatch(device) if is_timed else None
        self._most_groups = 0
        """Most groups of any microbatch so far, for logs. In the first one the number is unknown."""
        self._transfers = Transfers(device, self.arena, observers=self.observers, watch=self._watch)
        self._rewrites = Rewrites(device, self._transfers)
        self._referenced_spots = ReferencedSpots()
        self._reloads = Reloads(
            self._transfers,
            self._schedule,
            staying=self._staying,
            referenced_spots=self._referenced_spots,
            observers=self.observers,
        )
        self._counters = Counters()
        self._captures_step = False
        """Whether a graph of a whole step is captured."""
        self._watched = TagStats()
        """Statistics of saves between regions that belong to no group."""

    def set_policy(self, policy: TransferPolicy) -> None:
        """Set window and prefetch from here on."""
        with self._lock:
            self._schedule.policy = policy

    # Regions: what an integration calls in forward.

    def begin_forward(self, lane: Lane) -> None:
        """Forward begins in `lane`, which is new: what the backward behind it wants first may return meanwhile.

        Which that is the engine learns from the step before: `pass_order.py`.
        """
        if not is_inert():
            with self._lock:
                self._reloads.begin_forward(lane)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region for one run of `site`, or None where offload does nothing.

        The group joins `lane` at once: reloads follow the order in which forward reaches the sites.
        """
        return None if is_inert() else Region(self, lane, self.open_group(site, lane))

    def open_group(self, site: Site, lane: Lane) -> Group:
        """Return a new group of `site` at the end of `lane`, for `save` and `end`.

        Raises:
            StateError: A CUDA graph is being captured.
        """
        self._check_capture()
        with self._lock:
            self._forget_dropped()
            stats = self._counters.get_tag(site.tag)
            stats.groups += 1
            return lane.add(site, stats)

    def watch(self, lane: Lane) -> "Saving | contextlib.nullcontext[None]":
        """Return a context whose saves join the group that owns their storage; the rest stay on the device.

        An op outside of every region may save a view of what a region saves: the rotary embedding keeps query and key, which
        share a storage with the value that core attention keeps. Were it not watched, its save would hold the storage, and
        offloading would free nothing.
        """
        return Saving(self, lane, None) if self._may_watch() else contextlib.nullcontext()

    def follow(self, lane: Lane) -> "Following | contextlib.nullcontext[None]":
        """Return a context as `watch` does, for a stretch whose ops, outside of its regions, save nothing that leaves.

        What backward takes of it tells how far it has come, and how much it has let go of. Nobody looks for what shares a
        storage with a region, which takes the host several times as long; what does all the same is held elsewhere.
        """
        return Following(self, lane) if self._may_watch() else contextlib.nullcontext()

    def _may_watch(self) -> bool:
        if is_inert():
            return False
        self._check_capture()
        with self._lock:
            self._forget_dropped()  # no region may run inside, and do so
        return True

    def announce_backward(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Once backward has the gradient of `tensor`, reload the next groups of `lane`.

        For segments of forward without regions or `watch` that begin with `tensor`: then backward has left the segment and
        released its tensors.
        """
        if lane.groups and not is_inert():
            add_mark(tensor, lambda gradient: self.pass_backward(lane))

    def pass_backward(self, lane: Lane) -> None:
        """Backward has passed a segment without offloaded tensors: reload what comes next."""
        with self._lock:
            self._transfers.poll()
            self._reloads.execute(self._schedule.prefetch(lane))

    def expect_backward(self, lane: Lane, *, window_bytes: int | None = None) -> None:
        """Cancel the offload of the last groups of `lane` that are in flight: its backward comes next.

        Otherwise they would be freed just when backward needs them, and backward would wait for the reload.

        Args:
            lane: Lane of the microbatch.
            window_bytes: How many bytes may stay in flight. Compute waits for the rest, so that the loss, where memory peaks,
                finds the planned memory however slow copies are and however far the CPU is ahead.

        Streams:
            With `window_bytes`, the compute streams wait for copies to the host. The host does not block.
        """
        if is_inert():
            return
        with self._lock:
            self._transfers.poll()
            while window_bytes is not None and self._transfers.in_flight_bytes > window_bytes:
                self._transfers.release_oldest()
            for group in lane.list_held():
                for saved in group.submit_living():
                    group.stats.recalled_bytes += saved.size_bytes
            self._reloads.execute(self._schedule.expect_backward(lane))

    def capture(self, place: Place) -> Capture:
        """Return a context for the forward of a layer during capture or warm-up."""
        return Capture(self, place)

    def keep_static(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never offload the outputs of a captured graph: the graph still references them."""
        self._mark(tensors, KeptReason.REFERENCED)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never move the storages of `tensors`, as long as they live."""
        self._mark(tensors, KeptReason.MARKED)

    def keep_recomputed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never move the storages of `tensors`: a recompute empties them and fills them again, in place.

        Such a storage's version does not change. A copy made after it was emptied would reload garbage; a handle that keeps
        the storage sees the recomputed bytes.
        """
        self._mark(tensors, KeptReason.RECOMPUTED)

    def end(self, lane: Lane, group: Group, *, is_held: bool = False) -> None:
        """Offload `group` now, or with `is_held` at the next `flush`.

        Streams:
            Queues copies on the device-to-host stream, after what the compute streams have queued. The host does not block.

        Raises:
            StateError: The group was ended before, or one of its tensors was changed in place or resized since it was saved.
        """
        with self._lock:
            if group.state is not GroupState.SAVING:
                raise StateError(f"{group.place} was ended twice. End each region once.")
            lane.close(group, is_held=is_held)
            group.stats.saved_tensors += group.passed_tensors
            if group.passed_bytes:
                group.stats.add_kept(KeptReason.TOO_SMALL, group.passed_bytes)
            self._most_groups = max(self._most_groups, len(lane.groups))
            if is_held:
                self._held.append(weakref.ref(group))
            else:
                self._submit(group)

    def poll(self) -> None:
        """Release the memory of finished copies. Every end of a group does so too. The host does not block."""
        with self._lock:
            self._transfers.poll()

    def is_copying_out(self) -> bool:
        """Return whether a copy to the host may be in flight. The host does not block."""
        with self._lock:
            self._transfers.poll()
            return self._transfers.in_flight_bytes > 0 or self.staging.is_copying_out()

    def flush(self) -> None:
        """Offload the held groups, in the order in which they ended."""
        with self._lock:
            held, self._held = self._held, []
            for group in (reference() for reference in held):
                if group is not None and group.state is GroupState.HELD:
                    self._submit(group)

    # Hooks: what autograd calls.

    def save(self, tensor: torch.Tensor, *, lane: Lane, group: Group | None) -> Handle | KeptHandle | WrappedHandle:
        """Return the handle for a tensor that autograd saves in `group`, or in a watched segment if None."""
        local = find_local_tensor(tensor)
        if local is not None:
            return WrappedHandle(self.save(local, lane=lane, group=group), wrap_like(tensor))
        with self._lock:
            place, stats = lane.place, None
            if group is not None:
                place, stats = group.place, group.stats
                stats.saved_tensors += 1
                group.saved_tensors += 1
            for ledger in self.observers:
                ledger.count_save(tensor, place=place)
            reason = self._rules.find_kind_to_keep(tensor) or self._find_reason_to_stay(tensor, lane)
            if reason is not None:
                return _make_kept_handle(tensor, reason, place, group)
            key, contents = identify(tensor)
            view = get_view(tensor)
            saved = self._find_saved(key, contents, view)
            if saved is not None and not saved.counts_changes_of(tensor, view):
                saved = None
            if saved is not None and saved.lane is not lane.place and tensor.is_leaf and not tensor.requires_grad:
                # A table or a buffer, which lives on. Some ops change such ones without counting it, as batch norm does with
                # its running statistics: a copy from before must not serve, and moving it again would free nothing.
                self._staying.add(saved.storage, KeptReason.REFERENCED)
                return _make_kept_handle(tensor, KeptReason.REFERENCED, place, group)
            spot = None if group is None or group.site is None else (group.site, group.saved_tensors, contents.nbytes)
            if saved is None and spot is not None and self._referenced_spots.stays(spot):
                return _make_kept_handle(tensor, KeptReason.REFERENCED, place, group)
            saved = self._join_saved(saved, tensor, key, contents, spot, lane=lane, group=group)
            saved.add(tensor, view)
            if group is not None:
                group.add(saved)
            return Handle(self, saved, view, tensor, lane=lane, group=group)

    def _join_saved(
        self,
        before: SavedStorage | None,
        tensor: torch.Tensor,
        key: int,
        contents: Contents,
        spot: Spot | None,
        *,
        lane: Lane,
        group: Group | None,
    ) -> SavedStorage:
        """Return what `tensor` is one more save of: `before`, or a new one where that cannot serve."""
        stream = self.device.current_stream()
        if before is not None and before.is_ordered_on(stream):
            before.streams.add(stream)
            if before.state is not SavedState.RESIDENT:
                self._rewrites.follow(before, tensor, lane.place if group is None else group.place)
            return before
        place, stats = (lane.place, self._watched) if group is None else (group.place, group.stats)
        saved = SavedStorage(self._transfers, tensor, contents, place, stats, owner=stream)
        saved.lane, saved.spot = lane.place, spot
        if before is not None:
            saved.streams |= before.streams
        self._saved[key] = weakref.ref(saved)
        return saved

    def save_followed(self, tensor: torch.Tensor, *, lane: Lane, seen: set[int]) -> FollowedHandle | KeptHandle:
        """Return the handle for a tensor that autograd saves in a stretch that is only followed.

        Args:
            tensor: What it saves.
            lane: Where forward is.
            seen: The keys of the storages that were saved in that stretch before. Their handles keep these from being used
                again.
        """
        kept = keep_tensor(tensor, lane.place)
        with self._lock:
            if self._rules.find_kind_to_keep(tensor) is not None:
                return kept
            key = get_key(tensor)
            if key in seen or self._staying.find_reason(key) is not None:
                return kept
        seen.add(key)
        return FollowedHandle(self, kept, tensor.untyped_storage().nbytes(), lane=lane)

    def follow_backward(self, lane: Lane, size_bytes: int) -> None:
        """Backward takes a storage of `size_bytes` in a stretch that is followed."""
        with self._lock:
            if lane.away and is_in_backward():
                self._reloads.execute(self._schedule.let_go(lane, size_bytes))

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the saved tensor of `view`.

        The first unpacked tensor of a group shows that backward has reached it, unless an end mark did.

        Streams:
            The current stream waits for the copy to the device, where there was one. The host does not block.

        Raises:
            StateError: The bytes were changed in place, or their storage resized, since they were saved.
        """
        with self._lock:
            if saved.fault is not None:
                raise StateError(saved.fault)
            if group is None:
                if lane.away and is_in_backward():
                    is_let_go = not saved.is_let_go and saved.state is SavedState.RESIDENT
                    saved.is_let_go = saved.is_let_go or is_let_go
                    self._reloads.execute(self._schedule.let_go(lane, saved.size_bytes if is_let_go else 0))
            elif is_in_backward() and lane.is_news(group, is_offloaded=saved.state is SavedState.OFFLOADED):
                self._reloads.approach(lane, group)
            if saved.state in (SavedState.RESIDENT, SavedState.OFFLOADING):
                # While the copy to the host is queued the storage is still there; who frees it waits for that copy.
                saved.check_unchanged("backward took it", view)
                if saved.state is SavedState.OFFLOADING:
                    saved.streams.add(self.device.current_stream())  # one that reads it now, and need not have saved it
                return saved.get_alias(view)
            if saved.state is SavedState.OFFLOADED:
                saved.stats.prefetch_misses += 1
                self._reloads.reload({saved: saved.place})
            return self._transfers.take(saved, view)

    def approach_backward(self, lane: Lane, group: Group) -> None:
        """Backward has reached `group` and left the later ones: reload what comes next."""
        with self._lock:
            self._reloads.approach(lane, group)

    def leave_backward(self, lane: Lane, group: Group) -> None:
        """Backward has passed the start mark of `group`: release what it no longer needs, reload what comes next."""
        with self._lock:
            self._reloads.leave(lane, group.position)
            self._reloads.execute(self._schedule.prefetch(lane))

    # Graphs of whole steps.

    @contextlib.contextmanager
    def capture_step(self) -> Iterator[None]:
        """Let a graph capture a whole step inside: its forward, its backward, and all copies of the engine.

        Nothing that is captured runs, so the window alone bounds what is on its way to the host, and no host memory is taken
        that steps before have not taken. `finish_step` has to be called in the capture, as its end.

        The host blocks until the copies so far are done.
        """
        with self._lock:
            self._transfers.close()
            self._transfers.forget_streams()
            self.arena.forget_reads()
        self._captures_step = True
        try:
            yield
        finally:
            self._captures_step = False
            with self._lock:
                self.arena.forget_reads()  # by events of the graph, which nothing outside of it may wait for

    def _check_capture(self) -> None:
        if not self._captures_step and self.device.is_capturing():
            raise StateError(_CAPTURING)

    # The life of an engine.

    def finish_step(self) -> StepStats:
        """Return the statistics since the last call, and reset them.

        Where times are measured, the host blocks until the copies so far are done.
        """
        with self._lock:
            if self._captures_step and self.device.is_capturing():
                self._transfers.join()
            self._transfers.poll()
            self._forget_dropped()
            if self._watch is not None:
                self._watch.collect()
            stats = self._counters.finish()
            stats.host_bytes = self.arena.used_bytes
            stats.host_peak_bytes = self.arena.peak_bytes
            stats.host_reserved_bytes = self.arena.reserved_bytes
            return stats

    def read_tags(self) -> dict[str, TagStats]:
        """Return the statistics of each tag since the last `finish_step`, without a reset."""
        with self._lock:
            return self._counters.read_tags()

    # What a capture asks.

    def get_stats(self, tag: str) -> TagStats:
        """Return the numbers of `tag`, which live as long as the engine."""
        with self._lock:
            return self._counters.get_tag(tag)

    def find_reason_to_stay(self, tensor: torch.Tensor) -> KeptReason | None:
        """Return why a tensor of this kind stays on the device, or None."""
        with self._lock:
            reason = self._rules.find_kind_to_keep(tensor) or self._staying.find_reason(get_key(tensor))
            return KeptReason.FILTERED if reason is None and self._rules.is_filtered(tensor) else reason

    def is_too_small(self, saved: SavedStorage) -> bool:
        """Return whether `saved` stays on the device because it is too small."""
        return self._rules.is_too_small(saved)

    def make_saved(self, tensor: torch.Tensor, contents: Contents, place: Place) -> SavedStorage:
        """Return a saved storage that no group has: that of `tensor`, saved on the current stream."""
        return SavedStorage(self._transfers, tensor, contents, place, self._watched, owner=self.device.current_stream())

    @contextlib.contextmanager
    def observe(self, ledger: ActivationLedger) -> Iterator[None]:
        """Report what the engine saves, and its own device buffers, to `ledger` inside."""
        self.observers.append(ledger)
        try:
            yield
        finally:
            self.observers.remove(ledger)

    def close(self) -> None:
        """Release all memory. The host blocks until copies in flight are done.

        Memory that a graph still needs stays on the host: its backward works as before, and the memory is freed with graph and
        engine, or at the next call. So an exception that holds a graph causes no second one here.
        """
        with self._lock:
            self._held.clear()
            self._transfers.close()
            if self.arena.used_bytes:
                logger.warning("a graph still needs %s on the host: they stay there", format_bytes(self.arena.used_bytes))
            else:
                self.arena.close()

    def _find_reason_to_stay(self, tensor: torch.Tensor, lane: Lane) -> KeptReason | None:
        """Return why the storage of `tensor` stays, of a kind that could leave, or None where it may leave."""
        key = get_key(tensor)
        reason = self._staying.find_reason(key)
        if reason is None and (key in lane.filtered or self._rules.is_filtered(tensor)):
            lane.filtered.add(key)
            reason = KeptReason.FILTERED
        return reason

    def _find_saved(self, key: int, contents: Contents, view: View) -> SavedStorage | None:
        """Return the saved storage that has these bytes: one leaves once, however many saves and groups share it.

        The address of a storage names it, since a saved storage keeps that address from being used again. Another version of
        the bytes, or bytes outside of what has left already, are a saved storage of their own.
        """
        reference = self._saved.get(key)
        saved = None if reference is None else reference()
        return saved if saved is not None and saved.contents == contents and saved.holds(view) else None

    def _forget_dropped(self) -> None:
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

    def _mark(self, tensors: Iterable[torch.Tensor], reason: KeptReason) -> None:
        with self._lock:
            for tensor in tensors:
                if self._staying.find_reason(get_key(tensor)) is not reason:
                    self._staying.add(StorageRef(tensor), reason)

    def _submit(self, group: Group) -> None:
        self._transfers.poll()  # before copies that cannot be done yet: a query costs as much as a wait
        leaving: list[tuple[SavedStorage, HostBlock]] = []
        stats = group.stats
        for saved in group.submit_living():
            block = self._find_block(saved, group)
            if block is not None:
                saved.stats = stats
                leaving.append((saved, block))
        if leaving:
            size_bytes = self._transfers.offload(leaving, place=group.place, stats=stats)
            stats.d2h_bytes += size_bytes
            group.moved_bytes = size_bytes
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("offloading group %d of %d: %s", group.position + 1, self._most_groups, group.place)
                logger.debug("offload %s: %d storages, %s", group.place, len(leaving), format_bytes(size_bytes))
        if self.device.has_blocking_copies or self._must_wait(stats):
            self._transfers.poll()
            while self._must_wait(stats):
                self._counters.window_waits += 1
                self._transfers.release_oldest()
        self._reloads.execute(self._schedule.look_ahead())

    def _must_wait(self, stats: TagStats) -> bool:
        """Return whether compute has to wait for the oldest copy to the host, behind a group of the tag that `stats` are of."""
        if self._schedule.policy.must_wait(in_flight_bytes=self._transfers.in_flight_bytes):
            return True
        return self.most_in_flight is not None and self._transfers.count_in_flight(stats) > self.most_in_flight

    def _find_block(self, saved: SavedStorage, group: Group) -> HostBlock | None:
        """Return host memory for `saved`, or None where it stays, or has left with another group."""
        stats = group.stats
        if saved.state is not SavedState.RESIDENT:
            stats.shared_bytes += saved.size_bytes
            return None
        if saved.find_change("it was offloaded") is not None:
            stats.add_kept(KeptReason.CHANGED, saved.size_bytes)
            return None  # perhaps no backward wants it; one that does is told
        if saved.storage.key in group.filtered:  # since it was saved
            for view in saved.views:
                group.count_kept(saved.get_alias(view), KeptReason.FILTERED)
            return None
        if self._rules.is_too_small(saved):
            stats.add_kept(KeptReason.TOO_SMALL, min(saved.covered_bytes, saved.size_bytes))
            return None
        saved.choose_form()
        block = self.arena.find_block(saved.moved_bytes)
        if block is None:
            stats.add_kept(KeptReason.HOST_BUDGET, saved.size_bytes)
        return block


_CAPTURING = (
    "A CUDA graph is being captured, and offload inside it is not supported: a replay would not copy again. Capture without "
    "offload, or do not offload the captured part."
)


def _make_kept_handle(tensor: torch.Tensor, reason: KeptReason, place: Place, group: Group | None) -> KeptHandle:
    if group is not None and reason is not KeptReason.PARAMETER:
        group.count_kept(tensor, reason)
    return keep_tensor(tensor, place)
