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
    """The recording device, which can be told that a graph is being captured.

    As CUDA, it refuses waits in a capture for events from outside of it, waits outside for events of a capture, and a host that
    waits for what only a replay will run.
    """

    has_open_capture = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._captures = 0
        self._captured: dict[int, tuple[object, int]] = {}
        """By event, the event, so that its name is not used again, and the capture that it was recorded in; 0 is none."""

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
        assert self._captured[id(event)][1] == 0, "an event of a capture never passes"
        return super().is_done(event)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._captures += 1
        self.has_open_capture = True
        try:
            yield
        finally:
            self.has_open_capture = False


class _Look(NamedTuple):
    """A tensor over memory of a graph, which is held and whose storage is not."""

    memory: torch.Tensor
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def make(self) -> torch.Tensor:
        return self.memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class GraphPool:
    """The memory of graphs."""

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
        """Return a look at `tensor` where it lies in this pool, or the tensor."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        known = self._memory.get(tensor.untyped_storage()._cdata)
        if known is None:
            return tensor.detach()
        return _Look(known[0], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def release(self) -> None:
        """Say that forwards have been captured: what nothing holds now of what they made, no backward may read."""
        made = list(self._memory.values())[self._known :]
        self._released += [memory for memory, storage in made if storage.expired()]
        self._known = len(self._memory)

    def poison(self) -> int:
        """Fill with NaN what may be written between two replays, and return how many bytes that are."""
        for memory in self._released:
            memory.fill_(0xFF)
        return sum(memory.numel() for memory in self._released)


class CpuGraph(TorchDispatchMode):
    """A context that captures the operations inside, and `replay`, which runs them again."""

    def __init__(self, pool: GraphPool) -> None:
        super().__init__()
        self._pool = pool
        self._calls: list[tuple[Any, Any, Any, list[_Look]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        called = tree_map(self._pool.describe, (args, kwargs))
        fresh: list[_Look] = []

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
            args, kwargs = tree_map(_make, (args, kwargs), is_leaf=_is_look)
            found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for look, result in zip(fresh, found[: len(fresh)], strict=True):
                look.make().copy_(result)


def _is_look(leaf: Any) -> bool:
    return isinstance(leaf, _Look)


def _make(leaf: Any) -> Any:
    return leaf.make() if isinstance(leaf, _Look) else leaf


Layer = Callable[..., torch.Tensor]
"""Of the input, a weight and a function that returns the context of a tag's region."""


class GraphedLayer:
    """A layer for one microbatch, captured and replayed as Transformer Engine does it.

    Args:
        engine: Offloads what it saves.
        layer: See `Layer`.
        weight: Its only parameter.
        sample: Of its input.
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
    """Capture the forwards of all `stacks`, one for each microbatch, and then their backwards, the first stack's first."""
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
    """A layer whose regions save one storage each, and one that an op outside of them saves too."""
    projected = hidden @ weight
    with find_region("core_attn"):
        mixed = projected.sin() * projected
    gate = projected.cos()
    with find_region("attn_proj"):
        output = mixed @ weight
    return output * gate


def plain(tag: str) -> Any:
    """Return what stands for a region where nothing is offloaded."""
    return contextlib.nullcontext()
