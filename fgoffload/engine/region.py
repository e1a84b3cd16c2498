"""Regions of forward whose saves form a group, and the marks that track the position of backward.

[Note: Marks]
When the first tensor of a site is unpacked, backward has reached the site. A mark, which is a hook on the gradient of the
site's output, fires earlier. A mark on a lane's first input shows that backward has finished the lane. Marks do not change the
graph. An identity autograd function would, and could change results: if a site uses its input more than once, and a residual
connection also uses that input, the site's gradients would be summed before the residual's gradient is added, and
floating-point sums depend on their order. `end` is not part of the exit from `saving`, because some groups are offloaded only
after their region. For example, the input to a norm is also the residual, which is used again after attention.

[Note: When a region is inert]
A region does nothing in no-grad mode, during `torch.jit` tracing, inside other saved-tensor hooks, and where such hooks are
forbidden, as in a `torch.func` transform. It also does nothing during backward, because a recompute needs its tensors
immediately. Only the innermost hooks run, so in a non-reentrant checkpoint, a region would undo the checkpoint's savings.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine.capture import Capture
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.handles import KeptHandle, Packed, keep_tensor
from fgoffload.engine.identity import is_without_bytes
from fgoffload.engine.ledger import LedgerHook
from fgoffload.engine.torch_internals import (
    find_disabled_message,
    find_top_hooks,
    get_graph_task,
    is_tracing,
    peek_transform,
    pop_hooks,
    push_hooks,
)


def is_in_backward() -> bool:
    """Return whether this thread is running backward."""
    return get_graph_task() != -1


def is_inert() -> bool:
    """Return whether a region that begins here would do nothing. See [Note: When a region is inert]."""
    if not torch.is_grad_enabled() or get_graph_task() != -1 or is_tracing() or find_disabled_message() is not None:
        return True
    if peek_transform() is not None:
        return True
    hooks = find_top_hooks(False)  # noqa: FBT003 - respect an active tracer
    return hooks is not None and not is_engine_hook(hooks[0])


def is_engine_hook(pack: Any) -> bool:
    """Return whether the pack hook `pack` belongs to the engine."""
    return isinstance(pack, (Saving, LedgerHook, Capture))


class Saving:
    """Context manager and pack hook for a segment of forward. It can be entered several times.

    Saves join `group`. If `group` is None, they join the group that owns their storage. See `OffloadEngine.watch`.
    """

    __slots__ = ("_engine", "group", "lane")

    def __init__(self, engine: Any, lane: Lane, group: Group | None) -> None:
        self._engine = engine
        self.lane = lane
        self.group = group

    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Pack hook: return a handle for `tensor`."""
        engine, lane, group = self._engine, self.lane, self.group
        # Tensors that are never offloaded must take little CPU time: a grouped linear layer saves dozens of weights and empty
        # biases.
        if not engine.observers:
            if type(tensor) is torch.nn.Parameter or (tensor.numel() == 0 and is_without_bytes(tensor)):
                if group is not None:
                    group.passed_tensors += 1
                held = tensor if tensor.is_leaf else tensor.detach()
                place = lane.place if group is None else group.place
                return KeptHandle(held, tensor._version, None, place)  # noqa: SLF001 - no public name
            if engine.is_always_too_small(tensor):
                if group is None:
                    return keep_tensor(tensor, lane.place)
                group.count_small(tensor)
                return keep_tensor(tensor, group.place)
        handle: Packed = engine.save(tensor, lane=lane, group=group)
        return handle

    def unpack(self, handle: Packed) -> torch.Tensor:
        """Unpack hook: return the tensor of `handle`."""
        tensor = handle.take()
        for ledger in self._engine.observers:
            ledger.count_take(place=handle.place)
        return tensor

    def __enter__(self) -> None:
        """Install the hooks, as `torch.autograd.graph.saved_tensors_hooks` does."""
        push_hooks(self, self.unpack)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the hooks, even after an exception."""
        pop_hooks()


class Following(Saving):
    """Context manager and pack hook for saves that only show the position of backward. See `OffloadEngine.follow`."""

    __slots__ = ("_seen",)

    def __init__(self, engine: Any, lane: Lane) -> None:
        super().__init__(engine, lane, None)
        self._seen: set[int] = set()

    def __call__(self, tensor: torch.Tensor) -> Packed:
        """Pack hook: return a handle for `tensor`."""
        engine = self._engine
        if engine.observers or type(tensor) is torch.nn.Parameter or engine.is_always_too_small(tensor):
            return super().__call__(tensor)
        handle: Packed = engine.save_followed(tensor, lane=self.lane, seen=self._seen)
        return handle


class Region(Saving):
    """One run of a site: `enter` marks its input, `saving` returns a context manager, and `end` marks its output."""

    __slots__ = ()

    group: Group

    def enter(self, tensor: torch.Tensor) -> None:
        """Put the start mark on `tensor`, the input to the site.

        Only the first site of a lane gets a start mark. For other sites, the end mark of the previous site has the same effect.
        """
        mark_start(self._engine, self.lane, self.group, tensor)

    def saving(self) -> Saving:
        """Return a context manager. Saves inside it join the group."""
        return self  # avoids a second object per region

    def end(self, tensor: torch.Tensor | None = None, *, is_held: bool = False) -> None:
        """Offload the group, and put the end mark on `tensor`.

        Args:
            tensor: Output of the site, or of a later op that does not need the group's tensors. Pass None to set no mark, which
                takes less CPU time. Only the first unpacked tensor then shows that backward has reached the site. If
                the last ops of the site save nothing, it is unpacked later than a mark would fire.
            is_held: Whether to delay the offload until `OffloadEngine.flush`.

        Raises:
            StateError: The region was already ended, or host memory cannot be allocated or pinned.
        """
        engine, lane, group = self._engine, self.lane, self.group
        engine.end(lane, group, is_held=is_held)
        if tensor is not None:
            mark_end(engine, lane, group, tensor)


def mark_start(engine: Any, lane: Lane, group: Group, tensor: torch.Tensor) -> None:
    """Put the start mark of `group` on `tensor`, if `group` is the lane's first group. See `Region.enter`."""
    if group.position == 0:
        add_mark(tensor, lambda gradient: engine.leave_backward(lane, group))


def mark_end(engine: Any, lane: Lane, group: Group, tensor: torch.Tensor) -> None:
    """Put the end mark of `group` on `tensor`, an output of its site or of a later op."""
    add_mark(tensor, lambda gradient: engine.approach_backward(lane, group))


def add_mark(tensor: torch.Tensor, reach: Callable[[torch.Tensor], None]) -> None:
    """Call `reach` when backward has computed the complete gradient of `tensor`. See [Note: Marks]."""
    if tensor.requires_grad and not tensor.is_leaf:  # marks would accumulate on a leaf, which outlives the graph
        tensor.register_hook(reach)  # type: ignore[no-untyped-call]
