"""Offloads the saved tensors of modules in Megatron's CUDA graphs, and tracks forward through graph replays.

Transformer Engine captures one graph for each layer and microbatch. Megatron calls the layer's `_te_cuda_graph_capture` to warm
up and to capture. In later steps, Megatron calls `_te_cuda_graph_replay`, which runs neither the `forward` nor the hooks of
captured modules. Modules after the graph, such as experts, run in Python, and their saved tensors are offloaded as usual. Saved
tensors of captured modules are offloaded through staging slots (see [Note: Staging] in `fgoffload/engine/staging.py`).

A full-iteration graph contains forward and backward of all microbatches and the engine's copies (see
`OffloadEngine.capture_step`). A replay runs no Python, so statistics end with the captured step.

Source: `FullCudaGraphWrapper`, `GraphableMegatronModule` and `TransformerLayer` of megatron-core 0.16.1 to 0.19.2.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fgoffload.engine import CapturedForward, CapturedRegion, KeptReason, OffloadEngine, is_inert
from fgoffload.engine.place import Place
from fgoffload.engine.torch_internals import tree_leaves
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.site_actions import SiteActions
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches

GRAPHABLE = "megatron.core.transformer.module:GraphableMegatronModule"
LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_CAPTURE, _REPLAY = "_te_cuda_graph_capture", "_te_cuda_graph_replay"
_STEP_WRAPPER = "megatron.core.full_cuda_graph:FullCudaGraphWrapper"
_TRAINING = "training"
_RUNNER = "megatron.core.transformer.cuda_graphs:_CudaGraphRunner"


class GraphedLayers:
    """Offloads saved tensors of layers while they are captured and replayed."""

    def __init__(self, engine: OffloadEngine, actions: SiteActions) -> None:
        self._engine = engine
        self._actions = actions
        self.chunks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._forwards: weakref.WeakKeyDictionary[torch.nn.Module, list[CapturedForward | None]] = weakref.WeakKeyDictionary()
        """Captured forwards of each layer, by microbatch. None for a forward that offloads nothing."""
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()
        """Microbatches of each layer whose outputs are marked to stay on the GPU."""
        self.find_region: Callable[[str], CapturedRegion | None] | None = None
        """Function that returns a tag's region in the layer that is being captured or warmed up; None at other times."""
        self._steps: weakref.WeakSet[Any] = weakref.WeakSet()
        """Megatron's schedule wrappers that have captured a full iteration."""
        self.is_replaying = False
        """Whether the current layer replays its graph. If so, delayed groups may wait for the next graph launch."""

    def capture(self, layer: torch.nn.Module, run: Callable[[], Any], inputs: Iterable[Any]) -> Any:
        """Run the forward of `layer` for a capture or its warm-up, and offload the tensors that its regions save."""
        self._known.pop(layer, None)
        chunk = self.chunks.get(layer)
        if self.find_region is not None or is_inert() or chunk is None:
            return run()
        number = get_number(layer)
        if not self._actions.list_offloaded(chunk, number):
            return run()
        engine = self._engine
        capture = engine.capture(Place(None, f"layers.{number} in a graph"))

        def find_region(tag: str) -> CapturedRegion | None:
            is_offloaded = self._actions.find_offloaded(chunk, number, tag) is not None
            return CapturedRegion(capture, engine.get_stats(tag)) if is_offloaded else None

        self.find_region = find_region
        try:
            with capture:
                outputs = run()
        finally:
            self.find_region = None
        forward = capture.finish(_list_tensors((inputs, outputs)))
        if engine.device.is_capturing():
            self._forwards.setdefault(layer, []).append(forward)
        else:
            self._forwards.pop(layer, None)  # a warm-up, so a new capture follows
        return outputs

    def replay(self, layer: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Replay the graph of `layer` for its current microbatch."""
        forwards, microbatch = self._forwards.get(layer), getattr(layer, "current_microbatch", 0)
        forward = forwards[microbatch % len(forwards)] if forwards else None
        if forward is None:
            outputs = run()
        else:
            outputs = self._engine.staging.replay_forward(forward, run)
            self._follow_backward(forward, outputs)
        known = self._known.setdefault(layer, set())
        if microbatch not in known:
            known.add(microbatch)  # every replay returns the same tensors
            self._engine.keep(_list_tensors(outputs), reason=KeptReason.REFERENCED)
        return outputs

    def _follow_backward(self, forward: CapturedForward, outputs: Any) -> None:
        staging = self._engine.staging
        node = next((one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None), None)
        if node is not None:  # one autograd node replays the whole backward
            node.register_prehook(lambda gradients: staging.enter_backward(forward))
            node.register_hook(lambda inputs, gradients: staging.leave_backward(forward))

    def capture_step(self, wrapper: Any, run: Callable[[], Any]) -> Any:
        """Run `wrapper` while it captures a full iteration, with offload."""
        self._steps.add(wrapper)
        with self._engine.capture_step():
            return run()

    def close(self) -> None:
        """Disable graphs whose offloaded tensors a closed engine cannot reload."""
        for wrapper in self._steps:
            if wrapper.cuda_graph[_TRAINING] is not None:
                wrapper.cuda_graph[_TRAINING] = _RemovedGraph(wrapper.cuda_graph[_TRAINING])
        self._steps.clear()
        for layer, forwards in self._forwards.items():
            graphs: Any = getattr(layer, "cuda_graphs", None)
            if graphs and any(forwards):
                graphs[:] = map(_RemovedGraph, graphs)
        self._forwards.clear()


class _RemovedGraph:
    """Placeholder for a graph whose engine is closed. It can be reset but not replayed."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            "This CUDA graph was captured with activation offload, which has been removed since, so its saved tensors "
            "are gone. Capture it again (`TECudaGraphHelper.create_cudagraphs`)."
        )

    replay = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _list_tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def is_capturing() -> bool:
    """Return whether Megatron is capturing layers or warming up for a capture. Such a forward is not part of a step."""
    return bool(load_module("megatron.core.transformer.cuda_graphs").is_graph_capturing())


def may_query() -> bool:
    """Return whether CUDA events may be queried. CUDA forbids queries during a capture."""
    return not (is_capturing() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()))


def follow_graphs(patches: Patches, get_offload: Callable[[], Any], run_layer: Callable[..., Any]) -> None:
    """Wrap the methods that capture and replay graphs. `run_layer` treats a replay as a forward of the layer."""
    for owner in (GRAPHABLE, LAYER):
        wrap_symbol(patches, owner, _CAPTURE, functools.partial(_capture, get_offload))
    wrap_symbol(patches, GRAPHABLE, _REPLAY, functools.partial(_replay, get_offload))
    wrap_symbol(patches, LAYER, _REPLAY, functools.partial(_replay_layer, get_offload, run_layer))
    wrap_symbol(patches, _STEP_WRAPPER, "__call__", functools.partial(_run_full_iteration, get_offload))
    module_name, _, class_name = _RUNNER.partition(":")
    if hasattr(getattr(load_module(module_name), class_name, None), "replay_graph_capture"):
        wrap_symbol(patches, _RUNNER, "replay_graph_capture", functools.partial(_replay_local_graph, get_offload))


def _capture(get_offload: Callable[[], Any], original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return get_offload().graphs.capture(layer, lambda: original(layer, *args, **kwargs), (args, kwargs))


def _replay(get_offload: Callable[[], Any], original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    offload = get_offload()
    outputs = offload.graphs.replay(layer, lambda: original(layer, *args, **kwargs))
    offload.flush_delayed()  # the GPU is busy with the graph, so the CPU has time
    return outputs


def _replay_layer(get_offload: Callable[[], Any], run_layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    graphs = get_offload().graphs
    graphs.is_replaying = True
    try:
        return run_layer(original, *args, **kwargs)
    finally:
        graphs.is_replaying = False


def _replay_local_graph(get_offload: Callable[[], Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(*args, **kwargs)
    get_offload().engine.keep(_list_tensors(outputs), reason=KeptReason.REFERENCED)
    return outputs


def _run_full_iteration(get_offload: Callable[[], Any], original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    is_captured = not kwargs.get("forward_only") and wrapper.curr_iter(_TRAINING) == wrapper.cuda_graph_warmup_steps
    if not is_captured:
        return original(wrapper, *args, **kwargs)
    return get_offload().graphs.capture_step(wrapper, lambda: original(wrapper, *args, **kwargs))
