"""CUDA graphs on the CPU: replays captured operations on the memory that they were captured with.

As in a CUDA graph pool, memory without owners after the capture may be overwritten between two replays. `poison` fills it with
NaN, which exposes a backward that reads a tensor before its reload.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fgoffload.engine import CapturedForward, CapturedRegion, OffloadEngine
from fgoffload.engine.place import Place
from support.recording import RecordingCpuDevice


class GraphDevice(RecordingCpuDevice):
    """The recording device with graph capture.

    Like CUDA, it rejects waits in a capture for events from outside, waits outside for events of a capture, and host waits for
    captured work.
    """

    has_open_capture = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._captures = 0
        self._captured: dict[int, tuple[object, int]] = {}
        """By id of an event: the event, which keeps the id unique, and the number of its capture, or 0."""

    def is_capturing(self) -> bool:
        return self.has_open_capture

    def record_event(self, stream: object, *, is_timed: bool = False) -> object:
        event = super().record_event(stream, is_timed=is_timed)
        self._captured[id(event)] = event, self._captures if self.has_open_capture else 0
        return event

    def wait_event(self, stream: object, event: object, hazard: object) -> None:
        assert self._captured[id(event)][1] == (self._captures if self.has_open_capture else 0), hazard
        super().wait_event(stream, event, hazard)

    def synchronize(self, event: object) -> None:
        assert not self.has_open_capture
        super().synchronize(event)

    def is_done(self, event: object) -> bool:
        if self.has_open_capture:
            return False
        assert self._captured[id(event)][1] == 0, "an event of a capture is never done"
        return super().is_done(event)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._captures += 1
        self.has_open_capture = True
        try:
            yield
        finally:
            self.has_open_capture = False


class _View(NamedTuple):
    """A view of graph memory that keeps the memory alive, but not the storage of the tensor."""

    memory: torch.Tensor
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def make(self) -> torch.Tensor:
        return self.memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class GraphPool:
    """The memory pool of graphs."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[torch.Tensor, StorageWeakRef]] = {}
        self._released: list[torch.Tensor] = []
        self._known = 0

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the bytes of `tensor`, in memory that outlives its storage."""
        memory = tensor.contiguous().view(-1).view(torch.uint8).clone() if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        array = (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
        adopted = torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)
        storage = adopted.untyped_storage()
        self._memory[storage._cdata] = memory, StorageWeakRef(storage)
        return adopted

    def describe(self, tensor: Any) -> Any:
        """Return a `_View` of `tensor` if it is in this pool, or else the tensor."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        known = self._memory.get(tensor.untyped_storage()._cdata)
        if known is None:
            return tensor.detach()
        return _View(known[0], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def release(self) -> None:
        """Mark memory of captured forwards that has no owner now, so that no backward may read it."""
        made = list(self._memory.values())[self._known :]
        self._released += [memory for memory, storage in made if storage.expired()]
        self._known = len(self._memory)

    def poison(self) -> int:
        """Fill memory that may be overwritten between two replays with NaN, and return its bytes."""
        for memory in self._released:
            memory.fill_(0xFF)
        return sum(memory.numel() for memory in self._released)


class CpuGraph(TorchDispatchMode):
    """Captures the operations inside its context. `replay` repeats them."""

    def __init__(self, pool: GraphPool) -> None:
        super().__init__()
        self._pool = pool
        self._calls: list[tuple[Any, Any, Any, list[_View]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        called = tree_map(self._pool.describe, (args, kwargs))
        fresh: list[_View] = []

        def adopt(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in known or not leaf.numel():
                return leaf
            adopted = self._pool.adopt(leaf)
            fresh.append(self._pool.describe(adopted))
            return adopted

        results = tree_map(adopt, func(*args, **kwargs))
        self._calls.append((func, *called, fresh))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self._calls:
            args, kwargs = tree_map(_make, (args, kwargs), is_leaf=_is_view)
            found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for view, result in zip(fresh, found[: len(fresh)], strict=True):
                view.make().copy_(result)


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, _View)


def _make(leaf: Any) -> Any:
    return leaf.make() if isinstance(leaf, _View) else leaf


Layer = Callable[..., torch.Tensor]
"""A function of the input, a weight, and a function that returns the region of a tag."""


class GraphedLayer:
    """A layer for one microbatch, captured and replayed like with Transformer Engine.

    Args:
        engine: Offloads the saved tensors.
        pool: The memory of its graphs.
        layer: See `Layer`.
        weight: The only parameter.
        sample: A sample input.
    """

    def __init__(
        self, engine: OffloadEngine, pool: GraphPool, layer: Layer, weight: torch.Tensor, sample: torch.Tensor
    ) -> None:
        self.engine = engine
        self.pool = pool
        self._layer = layer
        self._weight = weight
        self._input = torch.zeros_like(sample).requires_grad_()
        self.forward: CapturedForward | None = None

    def warm_up(self) -> None:
        output, _ = self._run()
        output.backward(torch.ones_like(output))
        self._input.grad = self._weight.grad = None

    def _run(self) -> tuple[torch.Tensor, CapturedForward | None]:
        engine = self.engine
        capture = engine.capture(Place(None, "a layer in a graph"))
        with capture:
            output = self._layer(self._input, self._weight, lambda tag: CapturedRegion(capture, engine.get_stats(tag)))
        return output, capture.finish([self._input, output])

    def capture_forward(self) -> None:
        self._forward_graph = CpuGraph(self.pool)
        with self._forward_graph:
            self._output, self.forward = self._run()

    def capture_backward(self) -> None:
        self._backward_graph = CpuGraph(self.pool)
        self._output_gradient = torch.zeros_like(self._output)
        with self._backward_graph:
            self._gradients = torch.autograd.grad(self._output, (self._input, self._weight), self._output_gradient)
        self._output = self._output.detach()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Graphed.apply(self, hidden, self._weight)

    def replay_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        def replay() -> torch.Tensor:
            self._forward_graph.replay()
            return self._output.detach()

        with torch.no_grad():
            self._input.copy_(hidden)
        return replay() if self.forward is None else self.engine.staging.replay_forward(self.forward, replay)

    def replay_backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        staging = self.engine.staging
        if self.forward is not None:
            staging.enter_backward(self.forward)
        self._output_gradient.copy_(gradient)
        self._backward_graph.replay()
        if self.forward is not None:
            staging.leave_backward(self.forward)
        return tuple(gradient.clone() for gradient in self._gradients)


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: GraphedLayer, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return layer.replay_forward(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *ctx.layer.replay_backward(gradient)


def capture_layers(engine: OffloadEngine, *stacks: Sequence[GraphedLayer]) -> None:
    """Capture the forwards and then the backwards of all `stacks`, one stack for each microbatch."""
    for stack in stacks:
        for layer in stack:
            layer.warm_up()
    with engine.device.capturing():
        for stack in stacks:
            for layer in stack:
                layer.capture_forward()
        stacks[0][0].pool.release()
        for stack in stacks:
            for layer in reversed(stack):
                layer.capture_backward()


def attention(hidden: torch.Tensor, weight: torch.Tensor, find_region: Callable[[str], Any]) -> torch.Tensor:
    """A layer of two regions. Each saves one own storage, and one that an op outside saves too."""
    projected = hidden @ weight
    with find_region("core_attn"):
        mixed = projected.sin() * projected
    gate = projected.cos()
    with find_region("attn_proj"):
        output = mixed @ weight
    return output * gate


def plain(tag: str) -> Any:
    """Return a null region for runs without offload."""
    return contextlib.nullcontext()
