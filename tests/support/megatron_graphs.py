"""Captures and replays Megatron-Core's own layers on the CPU with the graphs of `support/graphs.py`.

All other code is Megatron's: it chooses the captured part of a layer and the code after a replay, and calls the interface
around both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.trainer import Trainer
from support.graphs import CpuGraph, GraphDevice, GraphPool

GRAPHS = "megatron.core.transformer.cuda_graphs"


class _LayerGraph:
    """The graphs of one layer for one microbatch, callable with the layer's input."""

    def __init__(self, pool: GraphPool, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._layer = layer
        self._hidden = torch.zeros_like(hidden).requires_grad_()
        self._kwargs = kwargs
        self._forward, self._backward = CpuGraph(pool), CpuGraph(pool)

    def warm_up(self) -> list[torch.nn.Parameter]:
        """Run the layer once, and return the parameters that it uses."""
        outputs = [one for one in self._run() if one.requires_grad]
        parameters = list(self._layer.parameters())
        gradients = torch.autograd.grad(outputs, parameters, [torch.ones_like(one) for one in outputs], allow_unused=True)
        self.parameters = [one for one, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        return self.parameters

    def _run(self) -> Sequence[torch.Tensor]:
        with ignore_expected_warnings():
            outputs = self._layer(self._hidden, **self._kwargs)
        return [one for one in outputs if one is not None]

    def capture_forward(self) -> None:
        with self._forward:
            self._outputs = self._run()

    def capture_backward(self) -> None:
        outputs = [one for one in self._outputs if one.requires_grad]
        self._output_gradients = [torch.zeros_like(one) for one in outputs]
        with self._backward:
            self._gradients = torch.autograd.grad(outputs, [self._hidden, *self.parameters], self._output_gradients)
        self._has_gradient = [one.requires_grad for one in self._outputs]
        self._outputs = [one.detach() for one in self._outputs]

    def replay_forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            self._hidden.copy_(hidden)
        self._forward.replay()
        return tuple(one.detach() for one in self._outputs)

    def replay_backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        wanted = [one for one, has_gradient in zip(gradients, self._has_gradient, strict=True) if has_gradient]
        for buffer, gradient in zip(self._output_gradients, wanted, strict=True):
            buffer.copy_(gradient)
        self._backward.replay()
        return [gradient.clone() for gradient in self._gradients]

    def __call__(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return _Replay.apply(self, hidden, *self.parameters)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _LayerGraph, hidden: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        return graph.replay_forward(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.graph.replay_backward(gradients)


class GraphedTraining:
    """A trainer whose layers are captured after the first step.

    Args:
        trainer: A trainer on the CPU with a model of one chunk.
        modules: The captured modules, as in `--cuda-graph-modules`.
        device: The device of the engine, or None without offload.
    """

    def __init__(self, trainer: Trainer, modules: Sequence[str], device: GraphDevice | None) -> None:
        self.trainer = trainer
        self.pool = GraphPool()
        self._layers = list(trainer.chunks[0].decoder.layers)
        self._calls: dict[Any, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._device = device
        config = self._layers[0].config
        scopes = load_module("megatron.core.transformer.enums").CudaGraphModule
        config.cuda_graph_impl, config.cuda_graph_modules = "transformer_engine", [scopes[name] for name in modules]
        config.delay_offload_until_cuda_graph = False  # missing before 0.19; our engine delays without it
        for layer in self._layers:
            layer._set_offload_modules()  # reads the graph settings
        graphable = load_module("megatron.core.transformer.module").GraphableMegatronModule
        for module in trainer.chunks[0].modules():
            if isinstance(module, graphable):
                module.cuda_graphs, module.cuda_graph_manual_hooks = [], []

    def run_first_step(self) -> object:
        """Run a step eagerly, and record the arguments of all layers."""

        def record_call(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
            tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
            self._calls[layer] = (args[0] if args else tensors.pop("hidden_states")).detach(), tensors

        with contextlib.ExitStack() as hooks:
            for layer in self._layers:
                hooks.callback(layer.register_forward_pre_hook(record_call, with_kwargs=True).remove)
            return self.trainer.run_step()

    def capture(self) -> None:
        """Capture each layer for each microbatch, as `TECudaGraphHelper.create_cudagraphs` does."""
        module = load_module(GRAPHS)
        interface = load_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
        interface = interface.FineGrainedActivationOffloadingInterface
        microbatches = self.trainer.arguments.num_microbatches
        stacks = [[_LayerGraph(self.pool, layer, *self._calls[layer]) for layer in self._layers] for _ in range(microbatches)]
        offloads = self._device is not None
        module._set_capture_start()
        if offloads:
            interface.disable_offload()
        for graph in (graph for stack in stacks for graph in stack):
            graph.warm_up()
        if offloads:
            interface.enable_offload()
        with self._device.capturing() if offloads else contextlib.nullcontext():
            for stack in stacks:
                for graph in stack:
                    graph.capture_forward()
                self.pool.release()
                for graph in reversed(stack):
                    graph.capture_backward()
        for index, layer in enumerate(self._layers):
            layer.cuda_graphs = [stack[index] for stack in stacks]
        module._set_capture_end()
        if offloads:
            interface.reset()


@contextlib.contextmanager
def without_cuda(monkeypatch: Any) -> Iterator[None]:
    """Let Megatron capture and replay its layers without Transformer Engine and a GPU."""
    with monkeypatch.context() as patch:
        layer = load_module("megatron.core.transformer.transformer_layer").TransformerLayer
        graphable = load_module("megatron.core.transformer.module").GraphableMegatronModule
        patch.setattr(layer, "_get_te_cuda_graph_replay_args", graphable._get_te_cuda_graph_replay_args)
        patch.setattr(torch.cuda, "current_stream", lambda: "current")
        for name in ("is_torch_min_version", "is_te_min_version"):
            patch.setattr(f"megatron.core.transformer.transformer_layer.{name}", lambda version: True)
        yield
