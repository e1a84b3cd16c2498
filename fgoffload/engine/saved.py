"""Tracks one saved storage: the location of its bytes, and the format of its copies.

[Note: Ownership]
Autograd's graph owns handles (`handles.py`), a handle owns its saved storage, and a saved storage owns its host block and its
device buffer. Groups and lanes hold only weak references to submitted storages. So a dropped graph frees everything, whether a
backward, an exception or the end of a scope drops it, and nothing is reset between steps. No tensor here has a `grad_fn`: it
would close a reference cycle through the graph, which only Python's garbage collector frees.

[Note: Copy format]
The engine copies the range of the storage from the first byte that a save reaches to the last. Usually one contiguous saved
tensor covers the whole range, so the range is copied and reloaded with that tensor's type and size. Otherwise it is copied as
bytes. Bools are copied as bytes too, since a copy of bools may turn other nonzero bytes into 1. If the saves cover less than
half of the range, they are gathered, and the packed bytes are copied.
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
from fgoffload.transfer_schedule import SavedState

ON_DEVICE = (SavedState.RESIDENT, SavedState.OFFLOADING)
"""States in which the original storage still has the bytes."""


@dataclasses.dataclass(slots=True, eq=False)
class Reload:
    """Device buffer of a reloaded storage, with the streams that use it."""

    buffer: torch.Tensor
    """Buffer, uint8 `[n]`. It holds the bytes once `filled` has passed."""
    filled: Event
    owner: Stream
    """Compute stream on which the buffer was allocated."""
    is_dense: bool
    """Whether the buffer has packed views, which are not yet scattered to their offsets."""
    taken_on: set[Stream] = dataclasses.field(default_factory=set)
    """Compute streams that wait for `filled` and may read the buffer."""
    version: int | None = None
    """Version of the buffer when its first tensor was unpacked. None before."""
    views: dict[View, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Unpacked tensors, one object per view. See [Note: Unpacked tensors]."""


class Leftovers(Protocol):
    """Queues that a dying `SavedStorage` appends to, on any thread. The engine's next caller empties them."""

    abandoned: deque[Reload]
    dropped: deque[tuple[StorageRef, bool]]


class SavedStorage:
    """Bytes of a storage at one version. All saved tensors on it share them."""

    __slots__ = (
        "__weakref__", "_aliases", "_bases", "_copied_views", "_leftovers", "block", "contents", "covered_bytes", "d2h_done",
        "end", "fault", "gathered", "has_left", "is_released", "itemsize", "lane", "moved_bytes", "owner", "place", "reload",
        "start", "state", "stats", "storage", "streams", "uses", "whole",
    )  # fmt: skip

    def __init__(
        self, leftovers: Leftovers, tensor: torch.Tensor, contents: Contents, place: Place, stats: TagStats, *, owner: Stream
    ) -> None:
        self._leftovers = leftovers
        self._aliases: dict[View, torch.Tensor] = {}
        """Saved tensors by view, while the storage is on the device."""
        self._bases: dict[View, int] = {}
        """Id of each saved tensor's base, or of the tensor itself, by view."""
        self._copied_views: tuple[View, ...] = ()
        """Saved views, once the device memory is released."""
        self.place = place
        """Place of the first save."""
        self.stats = stats
        """Statistics of the tag that offloaded the storage, or saved it first if none has."""
        self.itemsize = tensor.element_size()
        """Bytes of an element of the first save, for the minimum number of elements."""
        self.state = SavedState.RESIDENT
        self.contents = contents
        """Identity of the bytes when they were saved."""
        self.storage = StorageRef(tensor)
        self.start = contents.nbytes
        self.end = 0
        """All saved views lie in the bytes `[start, end)` of the storage."""
        self.covered_bytes = 0
        """Upper bound of the bytes under all distinct views. Overlapping views count twice."""
        self.gathered: tuple[View, ...] = ()
        """Views to pack, if they cover less than half of the range. Otherwise empty, and the whole range is copied."""
        self.whole: View | None = None
        """View that covers the whole range, if the range is copied as this view. See [Note: Copy format]."""
        self.moved_bytes = 0
        """Bytes to copy in each direction, set when the storage is offloaded."""
        self.block: HostBlock | None = None
        self.d2h_done: Event | None = None
        self.reload: Reload | None = None
        self.lane = place
        """Place of the lane of the first save."""
        self.owner = owner
        """Compute stream of the first save. The reloaded buffer is allocated on it."""
        self.streams: set[Stream] = {owner}
        """Compute streams on which tensors of the storage were saved."""
        self.has_left = False
        """Whether a copy to the host was ever queued."""
        self.is_released = False
        """Whether the lane counts the storage as released by backward."""
        self.uses = 0
        """Number of groups with this storage that backward has not left."""
        self.fault: str | None = None
        """Reason why the bytes are lost, or None. The error is raised only when backward needs them."""

    @property
    def views(self) -> Collection[View]:
        """Distinct saved views, in order."""
        return self._aliases.keys() or self._copied_views

    @property
    def size_bytes(self) -> int:
        """Bytes of the range that all views lie in."""
        return self.end - self.start

    def holds(self, view: View) -> bool:
        """Return whether the copied bytes, or the bytes to copy, contain `view`."""
        if self.state is SavedState.RESIDENT:
            return True
        # Lying in the copied range is not enough. Bytes between the saved views may have another version counter, as the
        # chunks of `unsafe_chunk` do, and may have changed after the copy.
        return view in self.views or (not self.gathered and any(saved.covers(view) for saved in self.views))

    def is_ordered_on(self, stream: Stream) -> bool:
        """Return whether a save on `stream` may share this object: its storage is on the device, or `stream` saved it before.

        If something else keeps the source of an offloaded storage alive, its memory is later freed only in the order of the
        streams that saved it before the offload.
        """
        return self.state in ON_DEVICE or stream in self.streams

    def add(self, tensor: torch.Tensor, view: View) -> None:
        """Register `tensor`, which autograd saved and which is `view` of this storage."""
        if self.state not in ON_DEVICE or view in self._aliases:
            return
        self._aliases[view] = tensor.detach() if tensor.requires_grad else tensor
        self._bases[view] = _find_base(tensor)
        if view.start < self.start:
            self.start = view.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if view.end > self.end:
            self.end = view.end
        self.covered_bytes += view.covered_bytes

    def counts_changes_of(self, tensor: torch.Tensor, view: View) -> bool:
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
        """Return the range to copy, unless it is gathered. The storage must be on the device."""
        if self.whole is not None:
            return self._aliases[self.whole]
        return get_byte_range(self.get_any_alias(), start=self.start, end=self.end)

    def choose_form(self) -> None:
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

    def find_change(self, act: str, view: View | None = None) -> str | None:
        """Describe how the bytes of `view`, or of all views, changed since autograd saved them, or return None.

        The message names `act`, the next use of the bytes.
        """
        version, _, nbytes = self.contents
        for alias in self._aliases.values() if view is None else (self._aliases[view],):
            # Checked here for speed. `find_change` checks again for the message.
            if get_version(alias) != version or alias.untyped_storage().nbytes() != nbytes:
                return find_change(alias, version=version, nbytes=nbytes, place=self.place, act=act)
        return None

    def check_unchanged(self, act: str, view: View | None = None) -> None:
        """Reject bytes that changed since autograd saved them. See `find_change`.

        Raises:
            StateError: A saved tensor was changed in place, or its storage was resized, after it was saved.
        """
        change = self.find_change(act, view)
        if change is not None:
            raise StateError(change)

    def leave(self, block: HostBlock, d2h_done: Event) -> None:
        """Note that a copy to `block` is queued, which is done at `d2h_done`."""
        self.block = block
        self.d2h_done = d2h_done
        self.has_left = True
        self.state = SavedState.OFFLOADING
        if self.gathered:
            # Compute streams have queued the gather, so the storage may be released at once.
            self.state = SavedState.OFFLOADED
            self.drop_aliases()

    def recall(self) -> None:
        """Cancel the offload, since backward needs the bytes before their copy to the host is done.

        The host block is released at once, although the copy may still write it: the next copy to it runs on the same stream.
        """
        self.state = SavedState.RESIDENT
        self.block = self.d2h_done = None

    def return_to(self, tensor: torch.Tensor) -> None:
        """Use the storage of `tensor` again, since its bytes have changed after the copy."""
        if self._copied_views:
            detached = tensor.detach()
            bytes_now = detached.as_strided((self.contents.nbytes // detached.itemsize,), (1,), 0)
            self._aliases = {view: rebuild(view, bytes_now, buffer_start=0) for view in self._copied_views}
            self._copied_views = ()
        self.recall()

    def drop_aliases(self) -> None:
        """Release the device memory. Only the host block has the bytes from now on."""
        self._copied_views = tuple(self._aliases)
        self._aliases.clear()

    def __del__(self) -> None:
        if not hasattr(self, "has_left"):
            return  # an interrupt occurred during construction
        # Any thread may run this at any time, so only atomic appends are safe.
        if self.reload is not None and self.reload.taken_on != {self.reload.owner}:  # else only its own stream used it
            self._leftovers.abandoned.append(self.reload)
        self._leftovers.dropped.append((self.storage, self.has_left))


def _find_base(tensor: torch.Tensor) -> int:
    base = tensor._base  # noqa: SLF001 - no public name
    return id(tensor if base is None else base)


def find_change(tensor: torch.Tensor, *, version: int, nbytes: int | None, place: Place, act: str) -> str | None:
    """Describe how the bytes of `tensor` changed since autograd saved it at `place`, or return None if they did not.

    `version` and `nbytes`, the bytes of its storage, are from the save. `nbytes` of None skips this check. The message names
    `act`, the next use of the bytes.
    """
    name = f"A tensor of shape {list(tensor.shape)} that {place} saved for backward"
    found_version = get_version(tensor)
    if found_version != version:
        return (
            f"{name} was changed in place before {act}: it was saved at version {version} and is now at version "
            f"{found_version}. Change a clone of it, or do not offload its tag."
        )
    found_nbytes = nbytes if nbytes is None else tensor.untyped_storage().nbytes()
    if found_nbytes != nbytes:
        return (
            f"{name} was resized before {act}: its storage had {nbytes} bytes when it was saved and now has "
            f"{found_nbytes}. If code outside of autograd frees or refills it, call `OffloadEngine.keep` before it is saved."
        )
    return None
