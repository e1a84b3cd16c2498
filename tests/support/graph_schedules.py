"""Small runs with captured and replayed graphs, whose accesses the engine's waits must order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fgoffload.engine import OffloadEngine
from support.graphs import CpuGraph, GraphedLayer, GraphPool, attention, capture_layers, plain
from support.schedules import sine
from support.sites import Sites
from support.streams import FAR, NBYTES, ROWS, Program

LAYERS = 4
LAYER_BYTES = 3 * NBYTES
"""The bytes saved by the regions of `attention`."""


def _make_stacks(
    program: Program, count: int, *, budget: int = 1 << 20, prefetch: int = 0, captures_together: bool = False
) -> tuple[list[torch.Tensor], list[list]]:
    """Return the weights of a model, and its layers, as functions of their input, for each of `count` microbatches."""
    engine, weights = program.make_engine(budget=budget, prefetch=prefetch), [program.leaf() for _ in range(LAYERS)]
    if engine is None:
        return weights, [[lambda h, weight=weight: attention(h, weight, plain) for weight in weights]] * count
    pool = GraphPool()
    stacks = [
        [GraphedLayer(engine, pool, attention, weight, torch.zeros(ROWS, ROWS)) for weight in weights] for _ in range(count)
    ]
    if captures_together:
        capture_layers(engine, *stacks)
    else:
        for stack in stacks:
            capture_layers(engine, stack)
    return weights, stacks


def _run(stack: list, source: int | torch.Tensor) -> torch.Tensor:
    """Return the output of `stack` for an input, or for a random input with a given seed."""
    h = source
    if not isinstance(h, torch.Tensor):
        h = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(h))
    for layer in stack:
        h = layer(h / 8)
    return h


def _finish(program: Program, weights: list[torch.Tensor], *outputs: torch.Tensor) -> None:
    for output in outputs:
        output.backward(torch.ones_like(output))
    program.results += [weight.grad.clone() for weight in weights]


def graphed_layers(program: Program) -> None:
    weights, (stack,) = _make_stacks(program, 1)
    for seed in range(2):
        _finish(program, weights, _run(stack, seed))


def graphed_layers_replayed_in_another_order(program: Program) -> None:
    weights, stacks = _make_stacks(program, 2)
    _finish(program, weights, *[_run(stack, seed) for seed, stack in enumerate(stacks)])


def graphed_layers_without_a_backward(program: Program) -> None:
    weights, stacks = _make_stacks(program, 2, budget=(2 * LAYERS - 2) * LAYER_BYTES)
    for seed in range(3):
        outputs = [_run(stack, seed) for stack in stacks]
        outputs[1].backward(torch.ones_like(outputs[1]))
        del outputs
    _finish(program, weights, _run(stacks[0], 0))


def graphed_layers_with_two_microbatches_in_flight(program: Program) -> None:
    weights, stacks = _make_stacks(program, 2, captures_together=True)
    for _ in range(2):
        _finish(program, weights, *[_run(stack, seed) for seed, stack in enumerate(stacks)])


def single_graphed_layers_replayed_alone(program: Program) -> None:
    weights, (stack, _) = _make_stacks(program, 2, captures_together=True)
    for layer in stack:
        _run([layer], 0).sum().backward()
    program.results += [weight.grad for weight in weights]


def last_graphed_layers_replayed_alone(program: Program) -> None:
    weights, stacks = _make_stacks(program, 2, captures_together=True)
    outputs = [_run(stack[-1:], seed) for seed, stack in enumerate(stacks)]
    for output in outputs:
        output.sum().backward()
    program.results.append(weights[-1].grad)


def _reuse_a_block_in_use(program: Program, order: Sequence[int]) -> None:
    """Drop an eager autograd graph while its tensors are being reloaded, and replay layers that reuse its host memory."""
    weights, (stack,) = _make_stacks(program, 1, budget=len(order) * LAYER_BYTES, prefetch=FAR)
    engine = getattr(stack[0], "engine", None)
    sites = Sites(engine)
    h = weights[0] * 2
    for _ in range(3 * len(order)):
        h = sites(sine, h)
    if engine is not None:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del h
    for index in order:
        _run([stack[index]], 0)
    program.results += weights


def graphed_layer_reuses_a_block_in_use(program: Program) -> None:
    _reuse_a_block_in_use(program, (0,))


def graphed_layer_frees_its_slot_with_a_block_in_use(program: Program) -> None:
    # Layers 2 and 0 share a slot, and only layer 0 frees it immediately.
    _reuse_a_block_in_use(program, (2, 0))


def _capture_step(program: Program, *, window: int, prefetch: int, drops: bool) -> None:
    engine, weight = program.make_engine(window=window, prefetch=prefetch), program.leaf()
    for step in range(3):
        if engine is None or step == 0:
            _run_step(program, engine, weight, step, drops=drops)
        else:
            with engine.capture_step(), program.device.capturing(), CpuGraph(GraphPool()):
                _run_step(program, engine, weight, step, drops=drops)


def _run_step(program: Program, engine: OffloadEngine | None, weight: torch.Tensor, step: int, *, drops: bool) -> None:
    sites = Sites(engine, microbatch=step)
    h = weight * 2
    for _ in range(3):
        h = sites(lambda h: (h @ weight / 8).sin(), h)
    if engine is not None:
        engine.expect_backward(sites.lane)
        if drops:
            engine.approach_backward(sites.lane, sites.lane.groups[-1])
    if not drops:
        program.finish(h, weight=weight)
    del h
    if engine is not None:
        engine.finish_step()


def captured_steps(program: Program) -> None:
    _capture_step(program, window=NBYTES, prefetch=NBYTES, drops=False)


def captured_steps_with_all_copies_in_flight(program: Program) -> None:
    _capture_step(program, window=FAR, prefetch=FAR, drops=False)


def captured_steps_with_a_dropped_autograd_graph(program: Program) -> None:
    _capture_step(program, window=0, prefetch=FAR, drops=True)


GRAPH_SCHEDULES = (
    graphed_layers,
    graphed_layers_replayed_in_another_order,
    graphed_layers_without_a_backward,
    graphed_layers_with_two_microbatches_in_flight,
    single_graphed_layers_replayed_alone,
    last_graphed_layers_replayed_alone,
    graphed_layer_reuses_a_block_in_use,
    graphed_layer_frees_its_slot_with_a_block_in_use,
    captured_steps,
    captured_steps_with_all_copies_in_flight,
    captured_steps_with_a_dropped_autograd_graph,
)
