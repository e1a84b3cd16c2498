"""A saved storage: where its bytes are, and in which form they are copied.

[Note: What owns what]
Autograd's graph owns handles (`handles.py`); a handle owns its saved storage; a saved storage owns its host block and its
device buffer. Groups and lanes know saved storages only weakly once they have been submitted. So whatever drops the graph, a
backward, an exception or the end of a scope, gives everything back, in any order, and nothing is reset between steps. No tensor
kept here has a `grad_fn`, which would close a cycle through the graph, and memory would wait for Python's collector.

[Note: In which form bytes move]
What moves is a stretch of the storage, from the first byte that a save reaches to the last. Nearly always one saved tensor is
all of it, without gaps: then it moves as that tensor is, type and size, and comes back as one, so that nothing has to be looked
at in another way on the way. Else the stretch moves as bytes; so do bools, since a copy may make a 1 of any other byte that is
not 0. Where the saves cover less than half of the stretch, they are gathered, and that moves.
"""

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

import torch

from fgoffload.engine.device import Event, Stream
from fgoffload.engine.geometry import ALIGNMENT_BYTES, View, choose_gathered, get_gathered_bytes, get_stretch, rebuild
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.identity import Contents, StorageRef, get_version
from fgoffload.engine.place import Place
from fgoffload.engine.stats import TagStats
from fgoffload.engine.torch_internals import share_counter
from fgoffload.errors import StateError
from fgoffload.transfer_schedule import SavedState

if TYPE_CHECKING:
    from fgoffload.engine.staying import Spot


_ON_DEVICE = (SavedState.RESIDENT, SavedState.OFFLOADING)


class Reload:
    """A device buffer and the streams that use it."""

    __slots__ = ("buffer", "filled", "is_dense", "owner", "taken_on", "version", "views")

    def __init__(self, buffer: torch.Tensor, filled: Event, owner: Stream, *, is_dense: bool) -> None:
        self.buffer = buffer
        """uint8 `[n]`: holds the bytes once `filled` has passed."""
        self.filled = filled
        self.owner = owner
        """The compute stream that the allocator gave the buffer to."""
        self.is_dense = is_dense
        """Whether the bytes are gathered views, packed, and not yet each in its place."""
        self.taken_on: set[Stream] = set()
        """The compute streams that wait for `filled`, and may read the buffer since."""
        self.version: int | None = None
        """Version of the buffer when the first tensor was taken from it; None before."""
        self.views: dict[View, torch.Tensor] = {}
        """Tensors that were taken, by view: one object each. See [Note: Which tensor is handed back]."""

    @property
    def is_ordered(self) -> bool:
        """Return whether the buffer may be dropped as it is: only its own stream used it."""
        return self.taken_on == {self.owner}


class Leftovers(Protocol):
    """Takes what a saved storage leaves behind, from any thread: whoever runs next clears it up."""

    abandoned: deque[Reload]
    dropped: deque[tuple[StorageRef, bool]]


class SavedStorage:
    """One version of a storage's bytes, shared by all saved tensors on it."""

    __slots__ = (
        "__weakref__",
        "_aliases",
        "_bases",
        "_copied_views",
        "_leftovers",
        "block",
        "contents",
        "covered_bytes",
        "d2h_done",
        "end",
        "fault",
        "gathered",
        "has_left",
        "is_let_go",
        "itemsize",
        "lane",
        "moved_bytes",
        "owner",
        "place",
        "reload",
        "spot",
        "start",
        "state",
        "stats",
        "storage",
        "streams",
        "uses",
        "whole",
    )

    def __init__(
        self, leftovers: Leftovers, tensor: torch.Tensor, contents: Contents, place: Place, stats: TagStats, *, owner: Stream
    ) -> None:
        self._leftovers = leftovers
        self._aliases: dict[View, torch.Tensor] = {}
        """Saved tensors by view, while the storage is there."""
        self._bases: dict[View, int] = {}
        """Id of each saved tensor or of its base, by view."""
        self._copied_views: tuple[View, ...] = ()
        """The views, once it is not."""
        self.place = place
        """Where it was saved first."""
        self.stats = stats
        """Statistics of the tag that it was offloaded with; before that, of the tag that saved it first."""
        self.itemsize = tensor.element_size()
        """Bytes of an element of the first save, by which the minimum size counts."""
        self.state = SavedState.RESIDENT
        self.contents = contents
        """Identity of its bytes when it was saved."""
        self.storage = StorageRef(tensor)
        self.start = contents.nbytes
        self.end = 0
        """The stretch `[start, end)` of the storage that all saved views lie in, in bytes."""
        self.covered_bytes = 0
        """Upper bound of the bytes under all distinct views; overlapping views count twice."""
        self.gathered: tuple[View, ...] = ()
        """The views whose bytes leave, where that is less than half of the stretch; none where the whole stretch leaves."""
        self.whole: View | None = None
        """The view that is the whole stretch, where one is and it leaves as such. See [Note: In which form bytes move]."""
        self.moved_bytes = 0
        """Bytes that go over the link, each way, from when it leaves."""
        self.block: HostBlock | None = None
        self.d2h_done: Event | None = None
        self.reload: Reload | None = None
        self.lane = place
        """Place of the lane in which it was saved first."""
        self.owner = owner
        """The compute stream that saved it first, whose memory it comes back to."""
        self.streams: set[Stream] = {owner}
        """The compute streams on which its tensors were saved."""
        self.has_left = False
        """Whether a copy to the host was ever made."""
        self.spot: Spot | None = None
        """Where in its region it was saved first, if in one."""
        self.is_let_go = False
        """Whether its lane counts it as released by backward."""
        self.uses = 0
        """The groups that list it and that backward has not left."""
        self.fault: str | None = None
        """Why the bytes are lost, if so. Raised only when they are needed."""

    @property
    def views(self) -> Collection[View]:
        """The saved views, each once, in order."""
        return self._aliases.keys() or self._copied_views

    @property
    def is_on_device(self) -> bool:
        """Whether the storage itself still has the bytes."""
        return self.state in _ON_DEVICE

    @property
    def size_bytes(self) -> int:
        """Bytes of the stretch that all views lie in."""
        return self.end - self.start

    def holds(self, view: View) -> bool:
        """Return whether `view` can be served from what was, or will be, copied."""
        if self.state is SavedState.RESIDENT:
            return True
        # Not whatever lies in the stretch that was copied: what lies between the saved views may count its changes apart, as
        # the chunks of `unsafe_chunk` do, and may have been changed since.
        return view in self.views or (not self.gathered and any(saved.covers(view) for saved in self.views))

    def is_ordered_on(self, stream: Stream) -> bool:
        """Return whether a save on `stream` may rely on this: its source is still here, or `stream` saved it before.

        A source that has left and that something else still holds is ordered, when it goes, behind the streams that saved it
        then, and behind no other.
        """
        return self.state in _ON_DEVICE or stream in self.streams

    def add(self, tensor: torch.Tensor, view: View) -> None:
        """Remember that autograd saved `tensor`, which looks at this storage through `view`."""
        if self.state not in _ON_DEVICE or view in self._aliases:
            return
        self._aliases[view] = tensor.detach() if tensor.requires_grad else tensor
        self._bases[view] = _find_base(tensor)
        if view.start < self.start:
            self.start = view.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if view.end > self.end:
            self.end = view.end
        self.covered_bytes += view.covered_bytes

    def counts_changes_of(self, tensor: torch.Tensor, view: View) -> bool:
        """Return whether what was saved as `view` tells of changes of `tensor`, which looks at the same bytes."""
        alias = self._aliases.get(view)
        return alias is None or self._bases[view] == _find_base(tensor) or share_counter(alias, tensor)

    def get_alias(self, view: View) -> torch.Tensor:
        """Return the tensor that was saved as `view`, while its storage is still there."""
        return self._aliases[view]

    def get_any_alias(self) -> torch.Tensor:
        """Return one of the saved tensors, while their storage is still there."""
        return next(iter(self._aliases.values()))

    def get_stretch(self) -> torch.Tensor:
        """Return what moves, where that is not gathered, while the storage is still there."""
        if self.whole is not None:
            return self._aliases[self.whole]
        return get_stretch(self.get_any_alias(), start=self.start, end=self.end)

    def choose_form(self) -> None:
        """Decide in which form the bytes move, if they do. See [Note: In which form bytes move]."""
        size_bytes = self.end - self.start
        self.gathered, self.whole, self.moved_bytes = (), None, size_bytes
        if 2 * self.covered_bytes < size_bytes:
            self.gathered = choose_gathered(self.views, size_bytes=size_bytes)
            if self.gathered:
                self.moved_bytes = get_gathered_bytes(self.gathered)
                return
        for view in self._aliases:  # from the first save on
            if view.is_contiguous and view.start == self.start and view.end == self.end and view.dtype is not torch.bool:
                self.whole = view
                break

    def find_change(self, act: str, view: View | None = None) -> str | None:
        """Describe how the bytes changed since autograd saved them, or return None.

        Args:
            act: What is about to happen to the bytes.
            view: Of the saved tensor in question; None asks for all.
        """
        version, _, nbytes = self.contents
        for alias in self._aliases.values() if view is None else (self._aliases[view],):
            # Checked here for speed, for every tensor of every step, and again in `find_change` for the message.
            if get_version(alias) != version or alias.untyped_storage().nbytes() != nbytes:
                return find_change(alias, version=version, nbytes=nbytes, place=self.place, act=act)
        return None

    def check_unchanged(self, act: str, view: View | None = None) -> None:
        """Refuse bytes that changed since autograd saved them.

        Args:
            act: What is about to happen to the bytes.
            view: Of the saved tensor in question; None asks for all.

        Raises:
            StateError: A saved tensor was changed in place, or its storage was resized, since it was saved.
        """
        change = self.find_change(act, view)
        if change is not None:
            raise StateError(change)

    def leave(self, block: HostBlock, d2h_done: Event) -> None:
        """Take note that the copy to `block` is queued, and done at `d2h_done`."""
        self.block = block
        self.d2h_done = d2h_done
        self.has_left = True
        self.state = SavedState.OFFLOADING
        if self.gathered:
            # The gathered bytes are a copy in the order of the compute streams: the storage itself may go at once.
            self.state = SavedState.OFFLOADED
            self.drop_aliases()

    def recall(self) -> None:
        """Stay after all: backward wants the bytes before their copy to the host is done, and they are still here.

        The host block goes back at once; whoever gets it next writes it on the stream that still writes it now.
        """
        self.state = SavedState.RESIDENT
        self.block = self.d2h_done = None

    def return_to(self, tensor: torch.Tensor) -> None:
        """Take the bytes from the storage again, on which `tensor` lies: what was copied is no longer what they are."""
        if self._copied_views:
            detached = tensor.detach()
            bytes_now = detached.as_strided((self.contents.nbytes // detached.itemsize,), (1,), 0)
            self._aliases = {view: rebuild(view, bytes_now, buffer_start=0) for view in self._copied_views}
            self._copied_views = ()
        self.recall()

    def drop_aliases(self) -> None:
        """Release the device memory: from here on the host block has the bytes."""
        self._copied_views = tuple(self._aliases)
        self._aliases.clear()

    def __del__(self) -> None:
        if not hasattr(self, "has_left"):
            return  # an interrupt came while it was made
        # Any thread may run this at any time: only atomic appends are safe. The next caller does the rest.
        if self.reload is not None and not self.reload.is_ordered:
            self._leftovers.abandoned.append(self.reload)
        self._leftovers.dropped.append((self.storage, self.has_left))


def _find_base(tensor: torch.Tensor) -> int:
    base = tensor._base  # noqa: SLF001 - no public name
    return id(tensor if base is None else base)


def find_change(tensor: torch.Tensor, *, version: int, nbytes: int | None, place: Place, act: str) -> str | None:
    """Describe how the bytes of `tensor` changed since autograd saved it, or return None.

    Args:
        tensor: What was saved.
        version: Of its bytes then.
        nbytes: Of its storage then; None does not ask.
        place: Where it was saved.
        act: What is about to happen to the bytes.
    """
    found_version = get_version(tensor)
    if found_version != version:
        return (
            f"{_name(tensor, place)} was changed in place before {act}: it is at version {found_version}, and was saved at "
            f"version {version}. Change a clone of it, or keep its tag out."
        )
    found_nbytes = nbytes if nbytes is None else tensor.untyped_storage().nbytes()
    if found_nbytes != nbytes:
        return (
            f"{_name(tensor, place)} lost its storage before {act}: the storage has {found_nbytes} bytes, and had {nbytes} "
            "when it was saved. Something frees or refills it outside of autograd; announce it with "
            "`OffloadEngine.keep` before it is saved."
        )
    return None


def _name(tensor: torch.Tensor, place: Place) -> str:
    return f"A tensor of shape {list(tensor.shape)} that {place} saved for backward"
