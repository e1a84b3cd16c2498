"""Tracks one saved storage: the location of its bytes, and the format of its copies.

[Note: Ownership]
Autograd's graph owns handles (`handles.py`), a handle owns its saved storage, and a saved storage owns its host block and its
device buffer. Groups and lanes hold only weak references to saved storages. So a dropped graph frees everything, whether
backward, an exception or the end of a scope drops it, and the engine resets nothing between steps. No tensor stored here has a
`grad_fn`, which would close a reference cycle through the graph that only Python's garbage collector can free.

[Note: Copy format]
The engine copies the range of the storage from the first to the last saved byte. Usually, one contiguous saved tensor covers
the whole range, and the engine copies and reloads the range with that tensor's type and size. Otherwise, it copies bytes. It
also copies bools as bytes, because a copy of bools may turn any nonzero byte into 1. If the saved tensors cover less than
half of the range, the engine packs them first and copies the packed bytes.
"""

import dataclasses
from collections import deque
from collections.abc import Collection
from typing import Protocol

import torch

from fgoffload.engine.device import Event, Stream
from fgoffload.engine.geometry import ALIGNMENT_BYTES, View, choose_gathered, get_byte_range, get_gathered_bytes, rebuild
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.identity import Contents, StorageRef, get_version
from fgoffload.engine.place import Place
from fgoffload.engine.stats import TagStats
from fgoffload.engine.torch_internals import share_counter
from fgoffload.errors import StateError
from fgoffload.memory_tiers import SavedState

ON_DEVICE = (SavedState.RESIDENT, SavedState.OFFLOADING)
"""States in which the original storage still contains the bytes."""


@dataclasses.dataclass(slots=True, eq=False)
class Reload:
    """Device buffer of a reloaded storage, with the streams that use it."""

    buffer: torch.Tensor
    """Tensor with the layout of the saved storage's `whole`, or uint8 `[n]`. It is filled once `filled` has completed."""
    filled: Event
    owner: Stream
    """Compute stream on which the buffer was allocated."""
    is_dense: bool
    """Whether the buffer contains packed views that are not yet scattered to their offsets."""
    taken_on: set[Stream] = dataclasses.field(default_factory=set)
    """Compute streams that wait for `filled` and may read the buffer."""
    version: int | None = None
    """Version of the buffer when its first tensor was unpacked. None before that."""
    views: dict[View, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Unpacked tensors, one object per view. See [Note: Unpacked tensors]."""


class ReleaseQueues(Protocol):
    """Queues to which a freed `SavedStorage` appends its resources, on any thread. Later engine calls empty the queues."""

    abandoned: deque[Reload]
    dropped: deque[tuple[StorageRef, bool]]


class SavedStorage:
    """Bytes of a storage at one version. All tensors that are saved from these bytes share this object."""

    __slots__ = (
        "__weakref__", "_aliases", "_bases", "_copied_views", "_queues", "block", "contents", "covered_bytes", "d2h_done",
        "end", "fault", "gathered", "is_released", "itemsize", "lane", "moved_bytes", "owner", "place", "reload",
        "start", "state", "stats", "storage", "streams", "uses", "was_offloaded", "whole",
    )  # fmt: skip

    def __init__(
        self, queues: ReleaseQueues, tensor: torch.Tensor, contents: Contents, place: Place, stats: TagStats, *, owner: Stream
    ) -> None:
        self._queues = queues
        self._aliases: dict[View, torch.Tensor] = {}
        """Saved tensors keyed by view. Empty once the device memory is released."""
        self._bases: dict[View, int] = {}
        """For each view, the id of the saved tensor's base, or of the tensor itself if it has no base."""
        self._copied_views: tuple[View, ...] = ()
        """Saved views, set when the device memory is released."""
        self.place = place
        """Place of the first save."""
        self.stats = stats
        """Statistics of the tag that offloaded the storage, or of the tag that saved it first if it is not offloaded yet."""
        self.itemsize = tensor.element_size()
        """Element size of the first saved tensor, to check the minimum number of elements."""
        self.state = SavedState.RESIDENT
        self.contents = contents
        """Identifies the storage and the version of its contents at the time of the save."""
        self.storage = StorageRef(tensor)
        self.start = contents.nbytes
        self.end = 0
        """All saved views are within the bytes `[start, end)` of the storage."""
        self.covered_bytes = 0
        """Upper bound on the number of bytes that the distinct views cover. Overlaps count twice."""
        self.gathered: tuple[View, ...] = ()
        """Views to pack, if they cover less than half of the range. Otherwise empty, and the whole range is copied."""
        self.whole: View | None = None
        """View that covers the whole range and determines the type and size of the copy, or None. See [Note: Copy format]."""
        self.moved_bytes = 0
        """Bytes to copy in each direction, set when the storage is offloaded."""
        self.block: HostBlock | None = None
        self.d2h_done: Event | None = None
        self.reload: Reload | None = None
        self.lane = place
        """Place of the first save's lane."""
        self.owner = owner
        """Compute stream of the first save. The reloaded buffer is allocated on it."""
        self.streams: set[Stream] = {owner}
        """Compute streams on which tensors of the storage were saved."""
        self.was_offloaded = False
        """Whether a copy to the host was ever queued."""
        self.is_released = False
        """Whether the lane's `released_bytes` already includes this storage."""
        self.uses = 0
        """Number of submitted groups with this storage that backward has not finished."""
        self.fault: str | None = None
        """Error message if the bytes are lost, or None. The error is raised only if backward needs the bytes."""

    @property
    def views(self) -> Collection[View]:
        """Distinct saved views, in save order."""
        return self._aliases.keys() or self._copied_views

    @property
    def size_bytes(self) -> int:
        """Size of the range that contains all views."""
        return self.end - self.start

    def holds(self, view: View) -> bool:
        """Return whether the copied bytes, or the bytes to copy, contain `view`."""
        if self.state is SavedState.RESIDENT:
            return True
        # A view within the copied range may still be missing. Bytes between the saved views may have another version counter,
        # like the chunks of `unsafe_chunk`, and may have changed after the copy.
        return view in self.views or (not self.gathered and any(saved.covers(view) for saved in self.views))

    def is_ordered_on(self, stream: Stream) -> bool:
        """Return whether a save on `stream` may share this object.

        This is true if the storage is on the device, or if an earlier save ran on `stream`. If something else keeps an
        offloaded storage alive, its memory is freed later, ordered only after work on the streams of the earlier saves.
        """
        return self.state in ON_DEVICE or stream in self.streams

    def add(self, tensor: torch.Tensor, view: View) -> None:
        """Register the saved `tensor`, whose layout in this storage is `view`."""
        if self.state not in ON_DEVICE or view in self._aliases:
            return
        self._aliases[view] = tensor.detach() if tensor.requires_grad else tensor
        self._bases[view] = _find_base(tensor)
        if view.start < self.start:
            self.start = view.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if view.end > self.end:
            self.end = view.end
        self.covered_bytes += view.covered_bytes

    def shares_counter_with(self, tensor: torch.Tensor, view: View) -> bool:
        """Return whether the tensor saved as `view` shares a version counter with `tensor`, which has the same bytes."""
        alias = self._aliases.get(view)
        return alias is None or self._bases[view] == _find_base(tensor) or share_counter(alias, tensor)

    def get_alias(self, view: View) -> torch.Tensor:
        """Return the tensor that was saved as `view`. Its storage must be on the device."""
        return self._aliases[view]

    def get_any_alias(self) -> torch.Tensor:
        """Return one of the saved tensors. Their storage must be on the device."""
        return next(iter(self._aliases.values()))

    def get_byte_range(self) -> torch.Tensor:
        """Return the bytes to copy if the views are not packed. The storage must be on the device."""
        if self.whole is not None:
            return self._aliases[self.whole]
        return get_byte_range(self.get_any_alias(), start=self.start, end=self.end)

    def choose_format(self) -> None:
        """Choose the format of the copies. See [Note: Copy format]."""
        size_bytes = self.end - self.start
        self.gathered, self.whole, self.moved_bytes = (), None, size_bytes
        if 2 * self.covered_bytes < size_bytes:
            self.gathered = choose_gathered(self.views, size_bytes=size_bytes)
            if self.gathered:
                self.moved_bytes = get_gathered_bytes(self.gathered)
                return
        for view in self._aliases:
            if view.is_contiguous and view.start == self.start and view.end == self.end and view.dtype is not torch.bool:
                self.whole = view
                break

    def find_change(self, next_use: str, view: View | None = None) -> str | None:
        """Return an error message if the bytes of `view` changed after autograd saved them, otherwise None.

        Without `view`, check all views. `next_use` completes the message, for example "backward used it".
        """
        version, _, nbytes = self.contents
        for alias in self._aliases.values() if view is None else (self._aliases[view],):
            # A fast check. `find_change` repeats it to create the message.
            if get_version(alias) != version or alias.untyped_storage().nbytes() != nbytes:
                return find_change(alias, version, nbytes, place=self.place, next_use=next_use)
        return None

    def check_unchanged(self, next_use: str, view: View | None = None) -> None:
        """Raise an error if the bytes changed after autograd saved them. For `next_use`, see `find_change`.

        Raises:
            StateError: A saved tensor was changed in place, or its storage was resized, after it was saved.
        """
        change = self.find_change(next_use, view)
        if change is not None:
            raise StateError(change)

    def start_offload(self, block: HostBlock, d2h_done: Event) -> None:
        """Record that a copy to `block` is queued. It is done when `d2h_done` completes."""
        self.block = block
        self.d2h_done = d2h_done
        self.was_offloaded = True
        self.state = SavedState.OFFLOADING
        if self.gathered:
            # The kernels that pack the views are queued on compute streams, so the storage may be released immediately.
            self.state = SavedState.OFFLOADED
            self.drop_aliases()

    def cancel_offload(self) -> None:
        """Cancel the offload, because backward needs the bytes before their copy to the host is done.

        The host block may be released while the copy still writes it: the next copy to the block runs on the same stream.
        """
        self.state = SavedState.RESIDENT
        self.block = self.d2h_done = None

    def use_storage_of(self, tensor: torch.Tensor) -> None:
        """Switch back to the storage of `tensor`, whose bytes changed after the copy."""
        if self._copied_views:
            detached = tensor.detach()
            bytes_now = detached.as_strided((self.contents.nbytes // detached.itemsize,), (1,), 0)
            self._aliases = {view: rebuild(view, bytes_now, buffer_start=0) for view in self._copied_views}
            self._copied_views = ()
        self.cancel_offload()

    def drop_aliases(self) -> None:
        """Release the device memory. From now on, only the host block contains the bytes."""
        self._copied_views = tuple(self._aliases)
        self._aliases.clear()

    def __del__(self) -> None:
        if not hasattr(self, "was_offloaded"):
            return  # an interrupt stopped the constructor
        # Any thread may run this at any time, so only atomic appends are safe.
        if self.reload is not None and self.reload.taken_on != {self.reload.owner}:  # otherwise, only its own stream used it
            self._queues.abandoned.append(self.reload)
        self._queues.dropped.append((self.storage, self.was_offloaded))


def _find_base(tensor: torch.Tensor) -> int:
    base = tensor._base  # noqa: SLF001 - no public name
    return id(tensor if base is None else base)


def find_change(tensor: torch.Tensor, version: int, nbytes: int | None, *, place: Place, next_use: str) -> str | None:
    """Return an error message if the bytes of `tensor` changed after autograd saved it at `place`, or None if they did not.

    `version` and `nbytes` are the version and the storage size at the save. If `nbytes` is None, the size is not checked.
    `next_use` completes the message, for example "backward used it".
    """
    name = f"A tensor of shape {list(tensor.shape)} that {place} saved for backward"
    found_version = get_version(tensor)
    if found_version != version:
        return (
            f"{name} was changed in place before {next_use}: it was saved at version {version} and is now at version "
            f"{found_version}. Change a clone of it, or do not offload its tag."
        )
    found_nbytes = nbytes if nbytes is None else tensor.untyped_storage().nbytes()
    if found_nbytes != nbytes:
        return (
            f"{name} was resized before {next_use}: its storage had {nbytes} bytes when it was saved and now has "
            f"{found_nbytes}. If code outside autograd frees or refills the storage, call `OffloadEngine.keep` before the save."
        )
    return None
