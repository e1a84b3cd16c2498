"""Forwards in grad mode: the lane that their groups join, and which of them this thread is in.

[Note: Which forward is running]
Saved-tensor hooks belong to a thread, so what is known of a forward does too. A context variable holds the innermost one, and
each knows the one around it: a module finds the forward of its own handle, a hand-placed region the innermost of any handle.
Nothing is looked up by process, so two threads, two models, and a model within another do not know each other.

[Note: Interrupted forwards]
An exception may come between any two lines of ours: Ctrl-C, an alarm, memory that runs out. A saved-tensor hook that stayed
on the thread would reach into whatever the process does next. So who opens something takes `Surroundings` before, and
restores them in a `finally`, whatever was opened since and however far it came. The `finally` has another one around it, for
an exception that comes while the first one restores.
"""

import contextvars
from typing import Any

import torch
from torch._dynamo.decorators import skip

from fgoffload.engine import Lane, OffloadEngine, Region, Saving, is_inert
from fgoffload.engine.handles import Handle, Packed, hold
from fgoffload.engine.region import _find_top_hooks, _pop_hooks, _push_hooks, is_in_backward
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
        while (hooks := _find_top_hooks(True)) is not None and hooks[0] is not self._hook:  # noqa: FBT003 - while tracing too
            _pop_hooks()
            if not isinstance(hooks[0], Saving):
                of_others.append(hooks)
        while of_others:
            _push_hooks(*of_others.pop())
        _running.set(self._running)
        _layer.set(self._layer)


@skip
def _find_top_hook() -> Any:
    """Return the pack hook that saves now, or None."""
    hooks = _find_top_hooks(True)  # noqa: FBT003 - while tracing too
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
    """Gives all that autograd saves to one group after another, each closed when it has grown to a size.

    What a backward inside of the block saves stays: a graph of gradients and a recompute want it at once. What is saved after
    such a backward has begun is another microbatch, with a lane of its own: the one before would grow with every step of a
    training loop in the block.

    Args:
        owner: The block. It counts the microbatches.
        engine: Moves the tensors.
        tag: Of all groups.
        group_bytes: A group that has so many, or more, leaves.
    """

    __slots__ = ("_group_bytes", "_owner", "_seen", "_size_bytes", "_tag")

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, tag: str, group_bytes: int) -> None:
        super().__init__(engine, begin_lane(owner), None)
        self._owner = owner
        self._tag = tag
        self._group_bytes = group_bytes
        self._seen: set[int] = set()
        self._size_bytes = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Return the handle from which autograd gets the tensor back."""
        if is_in_backward():
            return hold(tensor, self.lane.place)
        if self.lane.away < len(self.lane.groups):
            self.renew_lane()
        if self.group is None:
            site = Site(chunk=0, layer=len(self.lane.groups), tag=self._tag)
            self.group = self._engine.open_group(site, self.lane)
        handle = Saving.__call__(self, tensor)  # not through the base: one call behind the compiler's back is enough
        if isinstance(handle, Handle):
            self._count(tensor)
        return handle

    def renew_lane(self) -> Lane:
        """Let the group leave that is being filled, and return the lane to go on in: another where backward has begun on it."""
        self.close_group()
        if self.lane.away < len(self.lane.groups):
            self.lane = begin_lane(self._owner)
        return self.lane

    def close_group(self) -> None:
        """Let the group leave that is being filled, if there is one."""
        group = self.group
        if group is not None:
            self._forget_group()
            self._engine.end(self.lane, group)

    def _count(self, tensor: torch.Tensor) -> None:
        """Count the bytes of `tensor`, those of a storage once, and let the group leave when it is large enough."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._seen:
            self._seen.add(address)
            self._size_bytes += tensor.numel() * tensor.element_size()
        if self._size_bytes >= self._group_bytes:
            self.close_group()

    def _forget_group(self) -> None:
        self.group = None
        self._seen.clear()
        self._size_bytes = 0


class Forward:
    """One forward, from `begin` to `finish`.

    Args:
        owner: The handle or block that it belongs to.
        engine: Its engine.
        hook: Takes what is saved outside of regions; None watches it, so that it joins the groups whose storages it shares.
    """

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, hook: SizedSaving | None = None) -> None:
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
        # What is saved after the region belongs behind it: the block's group ends here, early where there is no region.
        lane = self._saving.lane if self._hook is None else self._hook.renew_lane()
        site = Site(chunk=0, layer=layer, tag=tag)
        region = self._engine.find_region(site, lane)
        if region is None:
            return None
        region.group.site = site
        if given is not None:
            region.enter(given)
        saving = UncompiledSaving(self._engine, lane, region.group)
        return SavingRegion(self.owner, tag, region=region, saving=saving, given=given)

    def leave(self) -> None:
        """Stop to take notice, however far `begin` or `finish` came."""
        try:
            self._around.restore()
        finally:
            self._around.restore()

    def finish(self, *, is_failed: bool = False) -> None:
        """Stop to take notice. What an exception left behind stays on the device, and goes with its graph."""
        self.leave()
        if not is_failed:
            if self._hook is not None:
                self._hook.close_group()
            self.owner.count_finished()


class SavingRegion:
    """A region that forward is in: what autograd saves goes to its group until `close`."""

    __slots__ = ("_around", "_owner", "_region", "_start", "_tag")

    def __init__(self, owner: EngineOwner, tag: str, *, region: Region, saving: Saving, given: torch.Tensor | None) -> None:
        self._owner = owner
        self._tag = tag
        self._region = region
        self._start = None if given is None else given.grad_fn
        self._around = Surroundings()
        saving.__enter__()

    def close(self, output: Any, *, is_failed: bool = False) -> None:
        """Stop saving, and let the group leave unless there was a failure, with its end mark on a tensor in `output`.

        Raises:
            StateError: What the region saved was changed in place since.
        """
        self._around.restore()
        if is_failed:
            return
        tensor = find_tensor(output)
        if self._owner.is_watching and self._region.group.is_unused and saves_something(tensor, start=self._start):
            self._owner.count_hidden(self._tag)
        self._region.end(tensor)
