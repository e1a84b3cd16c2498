"""Offload engine, which integrations hold and autograd calls through the hooks of regions.

`keep_rules.py` decides which tensors stay on the device, `fgoffload.transfer_schedule` when bytes are reloaded. `transfers.py`
copies them and orders streams.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from fgoffload.engine.capture import Capture
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
from fgoffload.engine.transfers import StopWatch, Transfers
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
        min_offloaded_numel: Elements. Storages with fewer saved elements stay on the device.
        min_offloaded_bytes: The same limit in bytes. Offloaded storages reach both.
        keep: The user's filter. A saved tensor stays on the device if it returns true.
        host_budget_bytes: Limit of host memory. All engines of a process with None share one default budget.
        is_timed: Measures copies and waits with a few more events per group, for which `finish_step` waits.
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
        """Returns whether a tensor stays on the device in any case, so that it need not be passed to `save`."""
        self.arena = HostArena(device, budget=get_process_budget() if host_budget_bytes is None else host_budget_bytes)
        # Backward runs on autograd's thread, and two models may train on two threads.
        self._lock = threading.RLock()
        # Created before the transfers, so a dropped engine releases its host memory after its copies and before its buffers.
        self.staging = Staging(device, self.arena, self._lock)
        """Staging slots of captured graphs."""
        self.observers: list[ActivationLedger] = []
        """Ledgers that count saves, takes and device buffers."""
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
        """Whether a graph of a whole step is captured."""

    def set_policy(self, policy: TransferPolicy) -> None:
        """Change the window and prefetch sizes."""
        with self._lock:
            self._schedule.policy = policy

    # Regions, which an integration calls in forward.

    def begin_forward(self, lane: Lane) -> None:
        """Note that forward begins in the new `lane`. See `pass_order.py` for reloads of the next backward meanwhile."""
        if not is_inert():
            with self._lock:
                self.execution.begin_forward(lane)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region for one run of `site`, whose group is at the end of `lane`. None if regions are inert here."""
        return None if is_inert() else Region(self, lane, self.open_group(site, lane))

    def open_group(self, site: Site, lane: Lane) -> Group:
        """Return a new group of `site` at the end of `lane`, for `save` and `end`.

        Raises:
            StateError: A CUDA graph is being captured.
        """
        self._prepare()
        with self._lock:
            stats = self._counters.get_tag(site.tag)
            stats.groups += 1
            return lane.add(site, stats)

    def watch(self, lane: Lane) -> "Saving | contextlib.nullcontext[None]":
        """Return a context whose saves join the group that owns their storage; the rest stay on the device.

        Use it for ops between regions. The rotary embedding, for example, saves query and key, which share a storage with the
        value that core attention saves. Without `watch` these saves would keep the storage on the device.
        """
        return Saving(self, lane, None) if self._may_watch() else contextlib.nullcontext()

    def follow(self, lane: Lane) -> "Following | contextlib.nullcontext[None]":
        """Return a faster context than `watch`, for segments whose ops outside of regions share no storage with a region.

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
                "A CUDA graph is being captured, and its replays would copy nothing. Capture without offload, or exclude the "
                "captured part from offload."
            )
        with self._lock:
            self.registry.forget_dropped()

    def announce_backward(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Reload the next groups of `lane` when backward has left the segment that begins with `tensor` and has no regions."""
        if lane.groups and not is_inert():
            add_mark(tensor, lambda gradient: self.pass_backward(lane))

    def pass_backward(self, lane: Lane) -> None:
        """Reload the next groups, since backward has passed a segment without offloaded tensors."""
        with self._lock:
            self._transfers.poll()
            self.execution.execute(self._schedule.prefetch(lane))

    def expect_backward(self, lane: Lane, *, window_bytes: int | None = None) -> None:
        """Cancel the offload of the last groups of `lane` that are in flight, since its backward comes next.

        Otherwise they would be freed just before backward needs them, and it would wait for the reload. With `window_bytes`,
        compute waits until no more bytes are in flight, so that the loss, where memory peaks, has the planned memory.

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
        """Return a context for the forward of a layer during capture or warm-up."""
        return Capture(self.device, self.staging, self.registry, self._rules, place)

    def keep(self, tensors: Iterable[torch.Tensor], *, reason: KeptReason = KeptReason.MARKED) -> None:
        """Exclude the storages of `tensors` from offload as long as they live.

        The `reason` is `REFERENCED` for outputs of a captured graph. It is `RECOMPUTED` for storages that a recompute empties
        and refills in place, since a copy made in between would have wrong bytes at an unchanged version.
        """
        with self._lock:
            self.registry.mark(tensors, reason)

    def end(self, lane: Lane, group: Group, *, is_held: bool = False) -> None:
        """Offload `group` now, or with `is_held` at the next `flush`. For streams see `Execution.submit`.

        Raises:
            StateError: The group was already ended, or one of its tensors was changed in place or resized after it was saved.
        """
        with self._lock:
            if group.state is not GroupState.SAVING:
                raise StateError(f"{group.place} was ended twice. End each region once.")
            lane.close(group, is_held=is_held)
            group.stats.saved_tensors += group.passed_tensors
            if group.passed_bytes:
                group.stats.add_kept(KeptReason.TOO_SMALL, group.passed_bytes)
            self.execution.most_groups = max(self.execution.most_groups, len(lane.groups))
            if is_held:
                self.execution.held.append(weakref.ref(group))
            else:
                self.execution.submit(group)

    def poll(self) -> None:
        """Release the memory of finished copies, as each end of a group does too. The host does not block."""
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

    # Hooks, which autograd calls.

    def save(self, tensor: torch.Tensor, *, lane: Lane, group: Group | None) -> Handle | KeptHandle | WrappedHandle:
        """Return the handle for a tensor that autograd saves in `group`, or in a watched segment if it is None."""
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
        """Return the handle for a tensor that autograd saves in a `follow` segment.

        `seen` has the keys of storages saved earlier in the segment. Their handles keep these keys in use.
        """
        kept = keep_tensor(tensor, lane.place)
        with self._lock:
            if self._rules.find_kind_to_keep(tensor) is not None:
                return kept
            key = get_key(tensor)
            if key in seen or self.registry.stays(key):
                return kept
        seen.add(key)
        return FollowedHandle(self, kept, tensor.untyped_storage().nbytes(), lane=lane)

    def follow_backward(self, lane: Lane, size_bytes: int) -> None:
        """Note that backward unpacks a storage of `size_bytes` in a `follow` segment."""
        with self._lock:
            if lane.remaining and is_in_backward():
                self.execution.execute(self._schedule.release(lane, size_bytes))

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the saved tensor of `view`. The first unpacked tensor of a group shows that backward has reached it.

        Streams:
            The current stream waits for the copy to the device, if there is one. The host does not block.

        Raises:
            StateError: The bytes were changed in place, or their storage was resized, after they were saved.
        """
        with self._lock:
            return self.execution.take(saved, view, lane, group)

    def approach_backward(self, lane: Lane, group: Group) -> None:
        """Reload the next groups, since backward has reached `group` and left the later ones."""
        with self._lock:
            self.execution.approach(lane, group)

    def leave_backward(self, lane: Lane, group: Group) -> None:
        """Release what backward no longer needs and reload the next groups, since it has passed the start mark of `group`."""
        with self._lock:
            self.execution.leave(lane, group.position)
            self.execution.execute(self._schedule.prefetch(lane))

    # Graphs of whole steps.

    @contextlib.contextmanager
    def capture_step(self) -> Iterator[None]:
        """Return a context in which a graph captures a whole step: forward, backward, and all copies of the engine.

        Only the window limits the bytes in flight to the host. Call `finish_step` at the end of the capture. The host blocks
        until earlier copies are done.
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
                self.arena.forget_reads()  # nothing outside of the graph may wait for its events

    # Statistics and end.

    def finish_step(self) -> StepStats:
        """Return the statistics since the last call, and reset them.

        If times are measured, the host blocks until the copies so far are done.
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
        """Return the statistics of `tag`, which live as long as the engine."""
        with self._lock:
            return self._counters.get_tag(tag)

    @contextlib.contextmanager
    def observe(self, ledger: ActivationLedger) -> Iterator[None]:
        """Report saves and the engine's own device buffers to `ledger` inside of the context."""
        self.observers.append(ledger)
        try:
            yield
        finally:
            self.observers.remove(ledger)

    def close(self) -> None:
        """Release all memory. The host blocks until copies in flight are done.

        Memory that an autograd graph still needs is freed with that graph and the engine.
        """
        with self._lock:
            self.execution.held.clear()
            self._transfers.close()
            if self.arena.used_bytes:
                logger.warning("an autograd graph still needs %s of host memory", format_bytes(self.arena.used_bytes))
            else:
                self.arena.close()
