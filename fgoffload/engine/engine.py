"""The offload engine. Integrations call it in forward, and autograd calls it through the hooks of regions.

`keep_rules.py` decides which tensors stay on the device. `fgoffload.transfer_schedule` decides when to reload the others.
`copies.py` queues the copies and orders the streams.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from fgoffload.engine.capture import Capture
from fgoffload.engine.copies import StopWatch, Transfers
from fgoffload.engine.device import Device
from fgoffload.engine.execution import Execution
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
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_budget import get_process_budget
from fgoffload.engine.identity import get_key
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.region import Following, Region, Saving, add_mark, is_engine_hook, is_in_backward, is_inert
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.saved_registry import SavedRegistry
from fgoffload.engine.staging import Staging
from fgoffload.engine.stats import Counters, KeptReason, StepStats, TagStats
from fgoffload.engine.torch_internals import wrap_internals
from fgoffload.errors import StateError
from fgoffload.plan import Site
from fgoffload.transfer_schedule import GroupState, TransferPolicy, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Offloads and reloads the tensors that autograd saves.

    Args:
        device: Device of the tensors.
        policy: Window and prefetch sizes.
        min_offloaded_numel: Storages with fewer saved elements stay on the device.
        min_offloaded_bytes: Storages with fewer saved bytes stay on the device.
        keep: The user's filter. A saved tensor stays on the device if the filter returns true.
        host_budget_bytes: Limit on host memory. With None, all engines of the process share a default budget.
        is_timed: Whether to time copies and waits. Timing needs more events per group, and `finish_step` waits for them.
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
        self._rules = KeepRules(
            device, min_offloaded_numel=min_offloaded_numel, min_offloaded_bytes=min_offloaded_bytes, keep=keep
        )
        self.is_always_too_small = self._rules.is_always_too_small
        """See `KeepRules.is_always_too_small`. If it returns true, `keep_tensor` can replace `save`."""
        self.arena = HostArena(device, budget=get_process_budget() if host_budget_bytes is None else host_budget_bytes)
        # Backward runs on autograd's thread, and two models may train on two threads.
        self._lock = threading.RLock()
        # Created before the transfers: Python frees attributes in order, and host memory must be freed before device buffers.
        self.staging = Staging(device, self.arena, self._lock)
        self.observers: list[ActivationLedger] = []
        """Ledgers that count saves, unpacks and device buffers."""
        self._watch = StopWatch(device) if is_timed else None
        self._transfers = Transfers(device, self.arena, observers=self.observers, watch=self._watch)
        self.registry = SavedRegistry(device, self._transfers, self._rules)
        self._counters = Counters()
        self.execution = Execution(
            device=device,
            transfers=self._transfers,
            schedule=self._schedule,
            registry=self.registry,
            rules=self._rules,
            arena=self.arena,
            counters=self._counters,
            observers=self.observers,
        )
        self._captures_step = False

    def set_policy(self, policy: TransferPolicy) -> None:
        """Change the window and prefetch sizes."""
        with self._lock:
            self._schedule.policy = policy

    # Methods that integrations call in forward.

    def begin_forward(self, lane: Lane) -> None:
        """Begin the forward of the new `lane`, during which the engine may reload tensors for the next backward."""
        if not is_inert():
            with self._lock:
                self.execution.begin_forward(lane)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region for one run of `site`, with a new group at the end of `lane`, or None if regions are inert."""
        return None if is_inert() else Region(self, lane, self.open_group(site, lane))

    def open_group(self, site: Site, lane: Lane) -> Group:
        """Append a new group for `site` to `lane`. Pass the returned group to `save` and `end`.

        Raises:
            StateError: A CUDA graph is being captured.
        """
        self._prepare()
        with self._lock:
            stats = self._counters.get_tag(site.tag)
            stats.groups += 1
            return lane.add(site, stats)

    def watch(self, lane: Lane) -> "Saving | contextlib.nullcontext[None]":
        """Return a context manager. Saves inside it join the group that owns their storage; the rest stay on the device.

        Use it for ops between regions. For example, the rotary embedding saves query and key, which share a storage with the
        value that core attention saves. Without `watch`, these saves would keep the storage on the device.
        """
        return Saving(self, lane, None) if self._may_watch() else contextlib.nullcontext()

    def follow(self, lane: Lane) -> "Following | contextlib.nullcontext[None]":
        """Return a faster context manager than `watch`, for segments whose ops share no storage with a region.

        It only tracks the position of backward and the bytes that backward releases.
        """
        return Following(self, lane) if self._may_watch() else contextlib.nullcontext()

    def _may_watch(self) -> bool:
        if is_inert():
            return False
        self._prepare()
        return True

    def _prepare(self) -> None:
        if not self._captures_step and self.device.is_capturing():
            raise StateError(
                "A CUDA graph is being captured, but its replays would not offload anything. Capture without offload, or "
                "exclude the captured part from offload."
            )
        with self._lock:
            self.registry.forget_dropped()

    def announce_backward(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Reload the next groups of `lane` when backward has passed `tensor`, the input to a segment without regions."""
        if lane.groups and not is_inert():
            add_mark(tensor, lambda gradient: self.pass_backward(lane))

    def pass_backward(self, lane: Lane) -> None:
        """Reload the next groups after backward has passed a segment without offloaded tensors."""
        with self._lock:
            self._transfers.poll()
            self.execution.execute(self._schedule.prefetch(lane))

    def expect_backward(self, lane: Lane, *, window_bytes: int | None = None) -> None:
        """Cancel the offload of the last groups of `lane` that are in flight, because the backward of `lane` runs next.

        Otherwise, their tensors would be freed just before backward needs them, and backward would wait for the reload. With
        `window_bytes`, compute first waits until at most that many bytes are in flight, because memory peaks at the loss.

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
            self.execution.execute(self._schedule.expect_backward(lane))

    def capture(self, place: Place) -> Capture:
        """Return a context manager that counts a layer's saves in warm-up, and stages them during graph capture."""
        return Capture(self.device, self.staging, self.registry, self._rules, place)

    def keep(self, tensors: Iterable[torch.Tensor], *, reason: KeptReason = KeptReason.MARKED) -> None:
        """Exclude the storages of `tensors` from offload until the storages are freed.

        Use `REFERENCED` for outputs of a captured graph, and `RECOMPUTED` for storages that a recompute empties and refills in
        place. An offload in between would copy wrong bytes, and the version counter would not show it.
        """
        with self._lock:
            self.registry.mark(tensors, reason)

    def end(self, lane: Lane, group: Group, *, is_held: bool = False) -> None:
        """Offload `group` now, or at the next `flush` if `is_held`. `Execution.submit` describes the stream order.

        Raises:
            StateError: The group was already ended, or host memory cannot be allocated or pinned.
        """
        with self._lock:
            if group.state is not GroupState.SAVING:
                raise StateError(f"{group.place} was ended twice. End each region once.")
            lane.close(group, is_held=is_held)
            group.stats.saved_tensors += group.passed_tensors
            if group.passed_bytes:
                group.stats.add_kept(KeptReason.TOO_SMALL, group.passed_bytes)
            self.execution.max_groups = max(self.execution.max_groups, len(lane.groups))
            if is_held:
                self.execution.held.append(weakref.ref(group))
            else:
                self.execution.submit(group)

    def poll(self) -> None:
        """Release the memory of finished copies. `end` also does this. The host does not block."""
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
            self.execution.flush()

    # Methods that autograd calls through hooks.

    def save(self, tensor: torch.Tensor, *, lane: Lane, group: Group | None) -> Handle | KeptHandle | WrappedHandle:
        """Return a handle for a tensor that autograd saves in `group`, or in a watched segment if `group` is None."""
        local = find_local_tensor(tensor)
        if local is not None:
            return WrappedHandle(self.save(local, lane=lane, group=group), wrap_like(tensor))
        with self._lock:
            place = lane.place
            if group is not None:
                place = group.place
                group.stats.saved_tensors += 1
                group.saved_tensors += 1
            for ledger in self.observers:
                ledger.count_save(tensor, place=place)
            reason = self.registry.find_reason_to_keep(tensor, lane)
            if reason is None:
                view = get_view(tensor)
                found = self.registry.join(tensor, view, lane=lane, group=group)
                if isinstance(found, SavedStorage):
                    found.add(tensor, view)
                    if group is not None:
                        group.add(found)
                    return Handle(self, found, view, tensor, lane=lane, group=group)
                reason = found
            if group is not None and reason is not KeptReason.PARAMETER:
                group.count_kept(tensor, reason)
            return keep_tensor(tensor, place)

    def save_followed(self, tensor: torch.Tensor, *, lane: Lane, seen: set[int]) -> FollowedHandle | KeptHandle:
        """Return a handle for a tensor that autograd saves in a `follow` segment.

        `seen` contains the keys of storages saved earlier in the segment, which their handles keep alive.
        """
        kept = keep_tensor(tensor, lane.place)
        with self._lock:
            if self._rules.find_unsupported_kind(tensor) is not None:
                return kept
            key = get_key(tensor)
            if key in seen or self.registry.is_excluded(key):
                return kept
        seen.add(key)
        return FollowedHandle(self, kept, tensor.untyped_storage().nbytes(), lane=lane)

    def follow_backward(self, lane: Lane, size_bytes: int) -> None:
        """After backward has unpacked `size_bytes` in a `follow` segment, reload groups that fit into the released memory."""
        with self._lock:
            if lane.remaining and is_in_backward():
                self.execution.execute(self._schedule.release(lane, size_bytes))

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the tensor saved as `view`. The first unpacked tensor of a group shows that backward has reached the group.

        Streams:
            If the tensor is reloaded, the current stream waits for the copy. The host does not block.

        Raises:
            StateError: The tensor was changed in place, or its storage was resized, after it was saved.
        """
        with self._lock:
            return self.execution.take(saved, view, lane, group)

    def approach_backward(self, lane: Lane, group: Group) -> None:
        """Reload the next groups after backward has reached `group`."""
        with self._lock:
            self.execution.approach(lane, group)

    def leave_backward(self, lane: Lane, group: Group) -> None:
        """Release unneeded tensors and reload the next groups, after backward has passed the start mark of `group`."""
        with self._lock:
            self.execution.leave(lane, group.position)
            self.execution.execute(self._schedule.prefetch(lane))

    # Whole-step graphs.

    @contextlib.contextmanager
    def capture_step(self) -> Iterator[None]:
        """Return a context manager in which a graph may capture a whole step: forward, backward, and the engine's copies.

        During the capture, only the window limits the bytes in flight to the host. Call `finish_step` before the capture ends.
        The host blocks until earlier copies are done.
        """
        with self._lock:
            self._transfers.close()
            self.arena.forget_reads()
        self._captures_step = True
        try:
            yield
        finally:
            self._captures_step = False
            with self._lock:
                self.arena.forget_reads()  # nothing outside the graph may wait for its events

    # Statistics and cleanup.

    def finish_step(self) -> StepStats:
        """Return the statistics since the last call, and reset them.

        With `is_timed`, the host blocks until all copies queued so far are done.
        """
        with self._lock:
            if self._captures_step and self.device.is_capturing():
                self._transfers.join()
            self._transfers.poll()
            self.registry.forget_dropped()
            if self._watch is not None:
                self._watch.collect()
            stats = self._counters.finish()
            stats.host_bytes = self.arena.used_bytes
            stats.host_peak_bytes = self.arena.peak_bytes
            stats.host_reserved_bytes = self.arena.reserved_bytes
            return stats

    def read_tags(self) -> dict[str, TagStats]:
        """Return the statistics of each tag since the last `finish_step`, without resetting them."""
        with self._lock:
            return self._counters.read_tags()

    def get_stats(self, tag: str) -> TagStats:
        """Return the statistics of `tag`. The engine updates this object in every step."""
        with self._lock:
            return self._counters.get_tag(tag)

    @contextlib.contextmanager
    def observe(self, ledger: ActivationLedger) -> Iterator[None]:
        """Report saves and the engine's own device buffers to `ledger` until the context manager exits."""
        self.observers.append(ledger)
        try:
            yield
        finally:
            self.observers.remove(ledger)

    def close(self) -> None:
        """Release all memory. The host blocks until copies in flight are done.

        Memory that an autograd graph still needs is freed once both the graph and the engine are freed.
        """
        with self._lock:
            self.execution.held.clear()
            self._transfers.close()
            if self.arena.used_bytes:
                logger.warning("an autograd graph still needs %s of host memory", format_bytes(self.arena.used_bytes))
            else:
                self.arena.close()
