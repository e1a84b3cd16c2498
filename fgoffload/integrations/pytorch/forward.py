"""Tracks which forwards with gradients each thread runs, and the lane of each: the groups that one microbatch offloads.

[Note: The running forward]
Saved-tensor hooks are per thread, so this module tracks forwards per thread. A context variable holds the innermost forward,
and each forward references the enclosing forward. A module uses the forward of its own handle, and a manual region uses the
innermost forward of any handle. No state is process-wide, so threads, models and nested models are independent.

[Note: Interrupted forwards]
Ctrl-C, an alarm or an `OutOfMemoryError` may interrupt a forward between any two lines, and a leftover saved-tensor hook would
affect later code. Code that installs hooks therefore creates a `ThreadState` first, and restores it in a `finally`.
"""

import contextvars
from typing import Any

import torch

from fgoffload.engine import Group, Lane, OffloadEngine, Saving, is_inert
from fgoffload.engine.geometry import get_view
from fgoffload.engine.handles import Handle, Packed, WrappedHandle, keep_tensor
from fgoffload.engine.identity import get_key
from fgoffload.engine.region import is_in_backward, mark_end, mark_start
from fgoffload.engine.torch_internals import find_top_hooks, get_sequence_number, pop_hooks, push_hooks, skip
from fgoffload.integrations.pytorch.outputs import find_tensor
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.plan import Site

_running: contextvars.ContextVar["Forward | None"] = contextvars.ContextVar("fgoffload_forward", default=None)
_layer: contextvars.ContextVar[int] = contextvars.ContextVar("fgoffload_layer", default=0)
"""Layer number of the innermost region."""


class ThreadState:
    """Snapshot of this thread's hooks, forward and layer. See [Note: Interrupted forwards]."""

    __slots__ = ("_hook", "_layer", "_running")

    @skip
    def __init__(self) -> None:
        self._hook = _find_top_hook()
        self._running = _running.get()
        self._layer = _layer.get()

    @skip
    def restore(self) -> None:
        """Restore the snapshot. Pop the engine's saved-tensor hooks, and keep the hooks of other code."""
        other_hooks = []
        while (hooks := find_top_hooks(True)) is not None and hooks[0] is not self._hook:  # noqa: FBT003 - while tracing too
            pop_hooks()
            if not isinstance(hooks[0], Saving):
                other_hooks.append(hooks)
        while other_hooks:
            push_hooks(*other_hooks.pop())
        _running.set(self._running)
        _layer.set(self._layer)


@skip
def has_hooks() -> bool:
    """Return whether the innermost saved-tensor hooks belong to an engine."""
    return isinstance(_find_top_hook(), Saving)


@skip
def _find_top_hook() -> Any:
    hooks = find_top_hooks(True)  # noqa: FBT003 - while tracing too
    return None if hooks is None else hooks[0]


def find_running(owner: EngineOwner | None = None) -> "Forward | None":
    """Return this thread's innermost forward, or None. With `owner`, search only the forwards of that owner."""
    forward = _running.get()
    while forward is not None and owner is not None and forward.owner is not owner:
        forward = forward.outer
    return forward


def record_inert(owner: EngineOwner, tag: str | None) -> None:
    """If offload does nothing here despite enabled gradients, record why for `tag`. If `tag` is None, count the forward."""
    if torch.is_grad_enabled() and is_inert():
        owner.count_inert(tag, hook=_find_top_hook(), is_in_backward=is_in_backward())


def begin_lane(owner: EngineOwner) -> Lane:
    """Begin the next microbatch of `owner`, and return its lane."""
    lane = Lane(chunk=0, microbatch=owner.count_forward())
    owner.get_engine().begin_forward(lane)
    return lane


class UncompiledSaving(Saving):
    """Saved-tensor hooks that `torch.compile` does not trace. They run for tensors saved between two compiled graphs."""

    __slots__ = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Pack hook: return a handle for `tensor`."""
        return super().__call__(tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, handle: Packed) -> torch.Tensor:
        """Unpack hook: return the tensor of `handle`."""
        return super().unpack(handle)


class SizedSaving(UncompiledSaving):
    """Saves the tensors of one site in consecutive groups of limited size.

    [Note: When a full group ends]
    Some ops, such as `rrelu`, write to a tensor after autograd has saved it, without changing its version counter. A full group
    therefore ends only when the next op, with another sequence number, saves a tensor. By then, the op that filled the group
    has returned, and its kernel is queued on a stream that the copy waits for.

    If the op that filled the group saved a strided slice of a storage, the group ends one op later. A gated MLP saves the two
    halves of one storage in consecutive ops. In separate groups, each half would cause a copy of the whole storage.

    A group is full at `group_bytes`. If `layer` is None, the layer of each group is its position in the lane.
    """

    __slots__ = ("_group_bytes", "_has_slice", "_layer", "_number", "_seen", "_size_bytes", "_tag")

    def __init__(self, engine: OffloadEngine, lane: Lane, *, tag: str, layer: int | None, group_bytes: int) -> None:
        super().__init__(engine, lane, None)
        self._tag = tag
        self._layer = layer
        self._group_bytes = group_bytes
        self._number = 0
        """Autograd's sequence number at the last save."""
        self._has_slice = False
        """Whether the last op saved a strided slice of a storage that was new to the group."""
        self._seen: set[int] = set()
        """Storages counted in `_size_bytes`."""
        self._size_bytes = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Pack hook: return a handle for `tensor`."""
        return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Packed:
        number, self._number = self._number, get_sequence_number()
        if number != self._number:
            if self._size_bytes >= self._group_bytes and not self._has_slice:
                self.close_group()
            self._has_slice = False
        if self.group is None:
            self.open_group()
        handle = Saving.__call__(self, tensor)  # not `super()`, which would disable the compiler a second time
        if isinstance(handle, (Handle, WrappedHandle)) and (key := get_key(tensor)) not in self._seen:
            self._seen.add(key)
            self._size_bytes += tensor.numel() * tensor.element_size()
            view = get_view(tensor)
            self._has_slice |= not view.covers(view)
        return handle

    def open_group(self) -> Group:
        """Begin a group and return it."""
        layer = len(self.lane.groups) if self._layer is None else self._layer
        site = Site(chunk=0, layer=layer, tag=self._tag)
        self.group = self._engine.open_group(site, self.lane)
        return self.group

    def close_group(self) -> Group | None:
        """End the current group and return it, or return None if there is none."""
        group, self.group = self.group, None
        self._seen.clear()
        self._size_bytes = 0
        if group is not None:
            self._engine.end(self.lane, group)
        return group


class BlockSaving(SizedSaving):
    """Saves the tensors of a block of code.

    Tensors saved during a backward stay on the device, since a double backward or a recompute needs them immediately. Tensors
    saved after the backward belong to a new microbatch. Otherwise, a training loop in the block would extend the lane forever.
    """

    __slots__ = ("_owner",)

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, tag: str, group_bytes: int) -> None:
        super().__init__(engine, begin_lane(owner), tag=tag, layer=None, group_bytes=group_bytes)
        self._owner = owner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Pack hook: return a handle for `tensor`."""
        if is_in_backward():
            return keep_tensor(tensor, self.lane.place)
        if self.lane.remaining < len(self.lane.groups):
            self.renew_lane()
        return self._pack(tensor)

    def renew_lane(self) -> Lane:
        """End the current group, and return the lane for later saves. The lane is new if backward has begun."""
        self.close_group()
        if self.lane.remaining < len(self.lane.groups):
            self.lane = begin_lane(self._owner)
        return self.lane


class Forward:
    """Forward of a model or a block, from `begin` to `finish`.

    `hook` receives tensors saved outside regions. Without it, they join the group that owns their storage, or stay on the GPU.
    """

    def __init__(self, owner: EngineOwner, engine: OffloadEngine, *, hook: BlockSaving | None = None) -> None:
        self.owner = owner
        self.outer = _running.get()
        self._before = ThreadState()
        self._engine = engine
        self._hook = hook
        self._saving = hook or UncompiledSaving(engine, begin_lane(owner), None)

    def begin(self) -> None:
        """Start receiving the tensors that autograd saves."""
        try:
            self._saving.__enter__()
            _running.set(self)
        except BaseException:
            self._before.restore()
            raise

    def begin_region(self, tag: str, tensor: torch.Tensor | None, *, layer: int | None = None) -> "SavingRegion | None":
        """Begin a region with the input `tensor`. Return None if offload does nothing here.

        `layer` defaults to the layer of the enclosing region, or to 0 without one.
        """
        if layer is None:
            layer = _layer.get()
        if is_inert():
            return None
        # Saves after the region belong to a later group, so end the block's group here.
        lane = self._saving.lane if self._hook is None else self._hook.renew_lane()
        saving = SizedSaving(self._engine, lane, tag=tag, layer=layer, group_bytes=self.owner.group_bytes)
        region = SavingRegion(self._engine, saving, tensor)
        _layer.set(layer)
        return region

    def keep_saves(self) -> None:
        """Keep later saved tensors on the device, even inside an open region, unless a group already owns their storage."""
        UncompiledSaving(self._engine, self._saving.lane, None).__enter__()

    def announce_backward(self, tensor: torch.Tensor | None) -> None:
        """Prefetch when backward has passed `tensor`, the input of a module whose tensors stay on the device."""
        if tensor is not None:
            self._engine.announce_backward(self._saving.lane, tensor)

    def expect_backward(self, *, window_bytes: int | None) -> None:
        """Prepare for backward, which runs next. See `OffloadEngine.expect_backward`."""
        self._engine.expect_backward(self._saving.lane, window_bytes=window_bytes)

    def stop(self) -> None:
        """Stop receiving saved tensors. This also works after an interrupted `begin` or `finish`."""
        self._before.restore()

    def finish(self, *, is_failed: bool = False) -> None:
        """Stop receiving saved tensors. The last group of a failed forward stays on the device and is freed with its graph."""
        self.stop()
        if not is_failed:
            if self._hook is not None:
                self._hook.close_group()
            self.owner.count_finished(self._saving.lane)


class SavingRegion:
    """Open region with the input `tensor`. Its groups receive the tensors that autograd saves until `close`.

    A long region, for example around many checkpoints, has several groups. With a single group, the first tensors would stay on
    the device until the region ends, and backward would reload the whole region at once.
    """

    __slots__ = ("_before", "_engine", "_saving")

    def __init__(self, engine: OffloadEngine, saving: SizedSaving, tensor: torch.Tensor | None) -> None:
        self._engine = engine
        self._saving = saving
        group = saving.open_group()
        if tensor is not None:
            mark_start(engine, saving.lane, group, tensor)
        self._before = ThreadState()
        saving.__enter__()

    def close(self, output: Any, *, is_failed: bool = False) -> None:
        """End the region. Unless it failed, offload its last group, and mark a tensor in `output` as the end of that group."""
        self._before.restore()
        if is_failed:
            return
        saving, tensor = self._saving, find_tensor(output)
        group = saving.close_group()
        if group is not None and tensor is not None:
            mark_end(self._engine, saving.lane, group, tensor)


class KeptRun:
    """Run of a module inside a region. The tensors that it saves stay on the device."""

    __slots__ = ("_before",)

    def __init__(self, forward: Forward) -> None:
        self._before = ThreadState()
        forward.keep_saves()

    def finish(self, output: Any) -> None:
        """End the run. Later saved tensors belong to the enclosing region."""
        self._before.restore()


class PlainRun:
    """Run of a module without the engine's hooks, which cost CPU time for each saved tensor.

    If this module saves a tensor that another module offloads, the tensor stays on the device.
    """

    __slots__ = ("_popped",)

    def __init__(self) -> None:
        self._popped: list[Any] = []
        while has_hooks():
            self._popped.append(find_top_hooks(True))  # noqa: FBT003 - while tracing too
            pop_hooks()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, output: Any) -> None:
        """End the run, and install the hooks again."""
        while self._popped:
            push_hooks(*self._popped.pop())
