"""Small runs on several streams of the recording device, with or without the engine.

Their own accesses are ordered, so the engine causes all unordered ones that the recording finds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from fgoffload import TransferPolicy
from fgoffload.engine import OffloadEngine
from support.graphs import GraphDevice
from support.recording import RecordingCpuDevice
from support.sites import Sites, make_engine

ROWS = 32
NBYTES = ROWS * ROWS * 4
FAR = 1 << 30

Function = Callable[..., torch.Tensor]


class Program:
    """A small training run on `device`, with or without the engine."""

    def __init__(self, device: RecordingCpuDevice, *, has_engine: bool = True) -> None:
        self.device = device
        self.results: list[torch.Tensor] = []
        """Results to compare with and without the engine."""
        self._has_engine = has_engine
        self._seed = 0
        self._engines: list[OffloadEngine] = []

    def make_engine(self, *, window: int = 0, prefetch: int = 0, budget: int = 1 << 20) -> OffloadEngine | None:
        if not self._has_engine:
            return None
        policy = TransferPolicy(window_bytes=window, prefetch_bytes=prefetch)
        self._engines.append(make_engine(self.device, policy=policy, host_budget_bytes=budget))
        return self._engines[-1]

    def leaf(self) -> torch.Tensor:
        """Return a new parameter that accumulates its gradient on the current stream."""
        self._seed += 1
        leaf = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(self._seed)).requires_grad_()
        self._follow(leaf)
        return leaf

    def run(self, function: Function, *inputs: torch.Tensor) -> Any:
        """Call `function` on the current stream, and let backward run its nodes there, too, like autograd."""
        outputs = function(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            self._follow(output)
            self._claim(output.grad_fn, self.device.current_stream())
        return outputs

    def wrap(self, function: Function) -> Function:
        return lambda *inputs: self.run(function, *inputs)

    def on(self, stream: object, function: Function) -> Function:
        """Return `function` to run on `stream` after the work on the current one."""

        def run(*inputs: torch.Tensor) -> Any:
            self.device.join(stream, self.device.current_stream())
            with self.device.on(stream):
                return self.run(function, *inputs)

        return run

    def backward(self, output: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward, after `record_all_streams` for all memory of the program."""
        self.device.record_all_streams()
        home = self.device.current_stream()
        with self.device.on(home):
            output.backward(torch.ones_like(output), retain_graph=retain_graph)

    def begin(self, **options: int) -> tuple[OffloadEngine | None, torch.Tensor, Sites]:
        """Return an engine with `options`, a new parameter, and sites of a first microbatch."""
        engine = self.make_engine(**options)
        return engine, self.leaf(), Sites(engine)

    def finish(self, *outputs: torch.Tensor, weight: torch.Tensor, joins: str | None = None) -> None:
        """Run backward of the sum of `outputs`, after the work on stream `joins`, and record the gradient of `weight`."""
        if joins:
            self.device.join("compute", joins)
        self.backward(self.run(torch.add, *outputs) if len(outputs) == 2 else outputs[0])
        self.results.append(weight.grad)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def forget_engines(self) -> None:
        """Drop the engines without closing them. They have reference cycles, so the collector must run."""
        self._engines.clear()
        gc.collect()

    def _follow(self, tensor: torch.Tensor) -> None:
        """Let backward continue on the stream of `tensor` once it has its gradient, where the engine's hooks run."""
        stream = self.device.current_stream()
        tensor.register_hook(lambda gradient: self.device.turn_to(stream))

    def _claim(self, node: Any, stream: object) -> None:
        """Run `node`, and its unclaimed predecessors, on `stream`."""
        if node is None or "stream" in node.metadata or hasattr(node, "variable"):
            return
        node.metadata["stream"] = stream
        node.register_prehook(lambda gradients: self.device.turn_to(stream))
        for before, _ in node.next_functions:
            self._claim(before, stream)


def record(
    schedule: Callable[[Program], None], *, has_engine: bool = True, **options: Any
) -> tuple[RecordingCpuDevice, Program]:
    """Run `schedule`, and return the device with its recording and the program with its results."""
    device = GraphDevice(**options)
    program = Program(device, has_engine=has_engine)
    with device.recording():
        schedule(program)
        program.close()
    return device, program
