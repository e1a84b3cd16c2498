"""Forwards in grad mode: the lane that their groups join, and which of them this thread is in.

[Note: Which forward is running]
Saved-tensor hooks belong to a thread, so what is known of a forward does too. A context variable holds the innermost one, and
each knows the one around it: a module finds the forward of its own handle, a hand-placed region the innermost of any handle.
Nothing is looked up by process, so two threads, two models, and a model within another do not know each other.

[Note: Interrupted forwards]
An exception may come between any two lines of ours: Ctrl-C, an alarm, memory that runs out. A saved-tensor hook that stayed on
the thread would reach into whatever the process does next. So who opens something takes `Surroundings` before, and restores
them in a `finally`, whatever was opened since and however far it came.
"""

import contextvars
from typing import Any

import torch

from fgoffload.engine import Group, Lane, OffloadEngine, Saving, is_inert
from fgoffload.engine.handles import Handle, Packed, WrappedHandle, hold
from fgoffload.engine.identity import get_key
from fgoffload.engine.region import is_in_backward, mark_end, mark_start
from fgoffload.engine.torch_internals import find_top_hooks, get_sequence_number, pop_hooks, push_hooks, skip
from fgoffload.integrations.pytorch.outputs import find_tensor, saves_something
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.plan import Site

_running: contextvars.ContextVar["Forward | None"] = contextvars.ContextVar("fgoffload_forward", default=None)
_layer: contextvars.ContextVar[int] = contextvars.ContextVar("fgoffload_layer", default=0)
"""Of the innermost module around that is a region."""


class Surroundings:
    """What this thread was in when it was made, to go back to. See [Note: Interrupted forwards].

    `torch.compile` does not look into it.
    """

    __slots__ = ("_hook", "_layer", "_running")

    @skip
    def __init__(self) -> None:
        self._hook = _find_top_hook()
        self._running = _running.get()
        self._layer = _layer.get()

    @skip
    def is_left(self) -> bool:
        """Return whether something was opened since and not closed."""
        return _find_top_hook() is not self._hook or _running.get() is not self._running or _layer.get() != self._layer

    @skip
    def restore(self) -> None:
        """Take off the saved-tensor hooks that were put on since, but for those of somebody else, and forget what was begun."""
        of_others = []
        while (hooks := find_top_hooks(True)) is not None and hooks[0] is not self._hook:  # noqa: FBT003 - while tracing too
            pop_hooks()
            if not isinstance(hooks[0], Saving):
                of_others.append(hooks)
        while of_others:
            push_hooks(*of_others.pop())
        _running.set(self._running)
        _layer.set(self._layer)


@skip
def _find_top_hook() -> Any:
    """Return the pack hook that saves now, or None."""
    hooks = find_top_hooks(True)  # noqa: FBT003 - while tracing too
    return None if hooks is None else hooks[0]


def find_running(owner: EngineOwner | None = None) -> "Forward | None":
    """Return the innermost forward that this thread is in, of `owner` if one is given, or None."""
    forward = _running.get()
    while forward is not None and owner is not None and forward.owner is not owner:
        forward = forward.outer
    return forward


def enter_layer(layer: int) -> None:
    """Forward is in a module of `layer` now, until the surroundings are restored."""
    _layer.set(layer)


def note_inert(owner: EngineOwner, tag: str | None) -> None:
    """Tell `owner` why nothing moves here, where that is no choice of the user's.

    Args:
        owner: Whose region, or forward, does nothing.
        tag: Of the region; None for a forward.
    """
    if not torch.is_grad_enabled():
        return
    if is_in_backward():
        owner.count_recomputed(tag)
    elif is_inert():
        owner.count_shadowed(tag, _find_top_hook())


def begin_lane(owner: EngineOwner) -> Lane:
    """Return the lane of one more microbatch of `owner`."""
    return Lane(chunk=0, microbatch=owner.count_forward())


class UncompiledSaving(Saving):
    """A pack hook that `torch.compile` does not look into.

    It would trace the engine wherever autograd saves between two graphs.
    """

    __slots__ = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Return the handle from which autograd gets the tensor back."""
        return super().__call__(tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take_back(self, handle: Packed) -> torch.Tensor:
        """Return the tensor of `handle`: the unpack hook."""
        return super().take_back(handle)


class SizedSaving(UncompiledSaving):
    """Gives what autograd saves at one site to one group after another, each ended when it has grown to a size.

    [Note: When a group that is full ends]
    Some ops write what they save after autograd has saved it, and count no version: `rrelu` writes its noise so. Autograd
    numbers its nodes, and makes the node of an op before it saves for it. So a group that is full is ended by the next save
    with another number: the op that filled the group has returned, and its kernel is queued on a stream that the copy waits
    for. What is full at the end is ended there.

    Args:
        engine: Moves the tensors.
        lane: Of the microbatch.
        tag: Of all groups.
        layer: Of all groups; None counts the groups of the lane instead.
        group_bytes: A group that has so many, or more, is full.
    """

    __slots__ = ("_group_bytes", "_layer", "_number", "_saved_tensors", "_seen", "_size_bytes", "tag")

    def __init__(self, engine: OffloadEngine, lane: Lane, *, tag: str, layer: int | None, group_bytes: int) -> None:
        super().__init__(engine, lane, None)
        self.tag = tag
        self._layer = layer
        self._group_bytes = group_bytes
        self._number = 0
        """Of the node that the last save was for."""
        self._seen: set[int] = set()
        self._size_bytes = 0
        self._saved_tensors = 0
        """Of the parts before."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Return the handle from which autograd gets the tensor back."""
        return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Packed:
        number, self._number = self._number, get_sequence_number()
        if number != self._number and self._size_bytes >= self._group_bytes:
            self.close_group()
        if self.group is None:
            self.open_group()
        handle = Saving.__call__(self, tensor)  # not through the base: one call behind the compiler's back is enough
        if isinstance(handle, (Handle, WrappedHandle)):
            self._count(tensor)
        return handle

    def open_group(self) -> Group:
        """Begin a group, and return it."""
        layer = len(self.lane.groups) if self._layer is None else self._layer
        site = Site(chunk=0, layer=layer, tag=self.tag)
        self.group = self._engine.open_group(site, self.lane)
        if self._layer is not None:
            self.group.site = site  # each execution saves the same in the same order, in all parts together
            self.group.saved_tensors = self._saved_tensors
        return self.group

    def close_group(self) -> Group | None:
        """End the group that is being filled, and return it; None where there is none."""
        group, self.group = self.group, None
        self._seen.clear()
        self._size_bytes = 0
        if group is not None:
            self._saved_tensors = group.saved_tensors
            self._engine.end(self.lane, group)
        return group

    def _count(self, tensor: torch.Tensor) -> None:
        """Count the bytes of `tensor`, those of a storage once."""
        key = get_key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._size_bytes += tensor.numel() * tensor.element_size()


class BlockSaving(SizedSaving):
    """Saves for a block of code that has no site.

    What a backward inside of the block saves stays: a graph of gradients and a recompute want it at once. What is saved after
    such a backward has begun is another microbatch, with a lane of its own: the one before would grow with every step of a
    training loop in the block.

    Args:
        owner: The block. It counts the microbatches.
        engine: Moves the tensors.
        tag: Of all groups.
        group_bytes: As for `SizedSaving`.
    """

    __slots__ = ("_owner",)

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, tag: str, group_bytes: int) -> None:
        super().__init__(engine, begin_lane(owner), tag=tag, layer=None, group_bytes=group_bytes)
        self._owner = owner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Return the handle from which autograd gets the tensor back."""
        if is_in_backward():
            return hold(tensor, self.lane.place)
        if self.lane.away < len(self.lane.groups):
            self.renew_lane()
        return self._pack(tensor)

    def renew_lane(self) -> Lane:
        """End the group that is being filled, and return the lane to go on in: another where backward has begun on it."""
        self.close_group()
        if self.lane.away < len(self.lane.groups):
            self.lane = begin_lane(self._owner)
        return self.lane


class Forward:
    """One forward, from `begin` to `finish`.

    Args:
        owner: The handle or block that it belongs to.
        engine: Its engine.
        hook: Takes what is saved outside of regions; None watches it, so that it joins the groups whose storages it shares.
    """

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, hook: BlockSaving | None = None) -> None:
        self.owner = owner
        self.outer = _running.get()
        """The forward around this one."""
        self._around = Surroundings()
        self._engine = engine
        self._hook = hook
        self._saving = hook or UncompiledSaving(engine, begin_lane(owner), None)

    def begin(self) -> None:
        """Take notice of what autograd saves from here on."""
        self._around = Surroundings()
        try:
            self._saving.__enter__()
            _running.set(self)
        except BaseException:
            self._around.restore()
            raise

    def begin_region(self, tag: str, given: torch.Tensor | None, *, layer: int | None = None) -> "SavingRegion | None":
        """Begin one execution of a site here, and return its region, or None where everything has to be left alone.

        Args:
            tag: Of the site.
            given: What goes in, for the start mark.
            layer: Of the site; None takes that of the innermost module around it that is a region, or 0.
        """
        if layer is None:
            layer = _layer.get()
        if is_inert():
            return None
        # What is saved after the region belongs behind it: the block's group ends here.
        lane = self._saving.lane if self._hook is None else self._hook.renew_lane()
        saving = SizedSaving(self._engine, lane, tag=tag, layer=layer, group_bytes=self.owner.group_bytes)
        return SavingRegion(self.owner, self._engine, saving, given)

    def leave(self) -> None:
        """Stop to take notice, however far `begin` or `finish` came."""
        self._around.restore()

    def finish(self, *, is_failed: bool = False) -> None:
        """Stop to take notice. What an exception left behind stays on the device, and goes with its graph."""
        self.leave()
        if not is_failed:
            if self._hook is not None:
                self._hook.close_group()
            self.owner.count_finished(self._saving.lane)


class SavingRegion:
    """A region that forward is in: what autograd saves goes to its groups until `close`.

    A long region, around many checkpoints for one, leaves in parts: were it one group, its first tensors would stay until
    forward has left it, and all of it would return at once.

    Args:
        owner: Is told of a region that saved nothing.
        engine: Moves the tensors.
        saving: Takes what is saved.
        given: What goes in, for the start mark.
    """

    __slots__ = ("_around", "_engine", "_owner", "_saving", "_start")

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, saving: SizedSaving, given: torch.Tensor | None) -> None:
        self._owner = owner
        self._engine = engine
        self._saving = saving
        self._start = None if given is None else given.grad_fn
        group = saving.open_group()
        if given is not None:
            mark_start(engine, saving.lane, group, given)
        self._around = Surroundings()
        saving.__enter__()

    def close(self, output: Any, *, is_failed: bool = False) -> None:
        """Stop saving, and let the last group leave unless there was a failure, with its end mark on a tensor in `output`."""
        self._around.restore()
        if is_failed:
            return
        saving, tensor = self._saving, find_tensor(output)
        group = saving.close_group()
        if group is None:
            return
        if self._owner.is_watching and group.is_unused and saves_something(tensor, start=self._start):
            self._owner.count_hidden(saving.tag)
        if tensor is not None:
            mark_end(self._engine, saving.lane, group, tensor)
