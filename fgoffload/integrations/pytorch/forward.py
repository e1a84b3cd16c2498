"""Forwards in grad mode: the lane that their groups join, and which of them this thread is in.

[Note: Which forward is running]
Saved-tensor hooks belong to a thread, so what is known of a forward does too. A context variable holds the innermost one, and
each knows the one around it: a module finds the forward of its own handle, a hand-placed region the innermost of any handle.
Nothing is looked up by process, so two threads, two models, and a model within another do not know each other.
"""

import contextvars
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine import Group, Lane, OffloadEngine, Saving, is_inert
from fgoffload.engine.handles import Handle, Packed, WrappedHandle, hold
from fgoffload.engine.identity import get_key
from fgoffload.engine.region import _find_top_hooks, _pop_hooks, _push_hooks, is_in_backward, mark_end, mark_start
from fgoffload.engine.torch_internals import get_sequence_number
from fgoffload.integrations.pytorch.outputs import find_tensor
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.plan import Site

_running: contextvars.ContextVar["Forward | None"] = contextvars.ContextVar("fgoffload_forward", default=None)


def find_running(owner: EngineOwner | None = None) -> "Forward | None":
    """Return the innermost forward that this thread is in, of `owner` if one is given, or None."""
    forward = _running.get()
    while forward is not None and owner is not None and forward.owner is not owner:
        forward = forward.outer
    return forward


def is_shadowed() -> bool:
    """Return whether a region that began here would save, were it not for saved-tensor hooks of somebody else."""
    return torch.is_grad_enabled() and not is_in_backward() and is_inert()


def begin_lane(owner: EngineOwner) -> Lane:
    """Return the lane of one more microbatch of `owner`."""
    return Lane(chunk=0, microbatch=owner.count_forward())


class UncompiledSaving(Saving):
    """A pack hook that `torch.compile` does not look into.

    It would trace the engine wherever autograd saves between two graphs. What ends it may come late, after an interrupt, and
    below hooks of somebody else: it takes off its own alone.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop, and leave hooks on that are not its own: those above go aside, and back."""
        above = []
        while (hooks := _find_top_hooks(True)) is not None and hooks[0] is not self:  # noqa: FBT003 - while tracing too
            above.append(hooks)
            _pop_hooks()
        if hooks is not None:
            super().__exit__(kind, error, trace)
        while above:
            _push_hooks(*above.pop())


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

    __slots__ = ("_group_bytes", "_layer", "_number", "_seen", "_size_bytes", "_tag")

    def __init__(self, engine: OffloadEngine, lane: Lane, *, tag: str, layer: int | None, group_bytes: int) -> None:
        super().__init__(engine, lane, None)
        self._tag = tag
        self._layer = layer
        self._group_bytes = group_bytes
        self._number = 0
        """Of the node that the last save was for."""
        self._seen: set[int] = set()
        self._size_bytes = 0

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
        self.group = self._engine.open_group(Site(chunk=0, layer=layer, tag=self._tag), self.lane)
        return self.group

    def close_group(self) -> Group | None:
        """End the group that is being filled, and return it; None where there is none."""
        group, self.group = self.group, None
        self._seen.clear()
        self._size_bytes = 0
        if group is not None:
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
        self.layers: list[int] = []
        """Of the modules that forward is in, where they are regions."""
        self._engine = engine
        self._hook = hook
        self._saving = hook or UncompiledSaving(engine, begin_lane(owner), None)

    def begin(self) -> None:
        """Take notice of what autograd saves from here on."""
        self._saving.__enter__()
        _running.set(self)

    def begin_region(self, tag: str, given: torch.Tensor | None, *, layer: int | None = None) -> "SavingRegion | None":
        """Begin one execution of a site here, and return its region, or None where everything has to be left alone.

        Args:
            tag: Of the site.
            given: What goes in, for the start mark.
            layer: Of the site; None takes that of the innermost module around it that is a region, or 0.
        """
        if layer is None:
            layer = self.layers[-1] if self.layers else 0
        if is_inert():
            return None
        # What is saved after the region belongs behind it: the block's group ends here.
        lane = self._saving.lane if self._hook is None else self._hook.renew_lane()
        group_bytes = self.owner.group_bytes
        saving = SizedSaving(self._engine, lane, tag=tag, layer=layer, group_bytes=group_bytes)
        return SavingRegion(self._engine, saving, given)

    def finish(self, *, is_failed: bool = False) -> None:
        """Stop to take notice. What an exception left behind stays on the device, and goes with its graph."""
        self._saving.__exit__(None, None, None)
        _running.set(self.outer)
        if not is_failed:
            if self._hook is not None:
                self._hook.close_group()
            self.owner.count_finished()


class SavingRegion:
    """A region that forward is in: what autograd saves goes to its groups until `close`.

    A long region, around many checkpoints for one, leaves in parts: were it one group, its first tensors would stay until
    forward has left it, and all of it would return at once.

    Args:
        engine: Moves the tensors.
        saving: Takes what is saved.
        given: What goes in, for the start mark.
    """

    __slots__ = ("_engine", "_saving")

    def __init__(self, engine: OffloadEngine, saving: SizedSaving, given: torch.Tensor | None) -> None:
        self._engine = engine
        self._saving = saving
        group = saving.open_group()
        if given is not None:
            mark_start(engine, saving.lane, group, given)
        saving.__enter__()

    def close(self, output: Any, *, is_failed: bool) -> None:
        """Stop saving, and let the last group leave unless there was a failure, with its end mark on a tensor in `output`."""
        saving = self._saving
        saving.__exit__(None, None, None)
        if not is_failed:
            group, tensor = saving.close_group(), find_tensor(output)
            if group is not None and tensor is not None:
                mark_end(self._engine, saving.lane, group, tensor)
