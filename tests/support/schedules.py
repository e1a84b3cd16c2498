"""Small runs on one stream, whose accesses the engine's waits must order."""

from __future__ import annotations

import contextlib

import torch

from fgoffload.errors import StateError
from support.sites import Sites
from support.streams import FAR, NBYTES, Program


def sine(h: torch.Tensor) -> torch.Tensor:
    return h.sin()


def square(h: torch.Tensor) -> torch.Tensor:
    return h * h


def sine_of_columns(h: torch.Tensor) -> torch.Tensor:
    return h[:, ::8].sin()


def run_layers(program: Program, sites: Sites, weight: torch.Tensor, *, layers: int = 3, is_held: bool = False) -> torch.Tensor:
    h = program.run(lambda w: w * 2, weight)
    for _ in range(layers):
        h = sites(program.wrap(lambda h: (h @ weight).sin()), h, is_held=is_held)
    return h


def _train(program: Program, *, window: int, prefetch: int, budget: int = 1 << 20) -> None:
    engine, weight = program.make_engine(window=window, prefetch=prefetch, budget=budget), program.leaf()
    for _ in range(2):
        output = run_layers(program, Sites(engine), weight)
        program.finish(output, weight=weight)


def step_without_prefetch(program: Program) -> None:
    _train(program, window=0, prefetch=0)


def step_with_small_window_and_prefetch(program: Program) -> None:
    _train(program, window=3 * NBYTES, prefetch=2 * NBYTES)


def step_with_unlimited_prefetch(program: Program) -> None:
    _train(program, window=0, prefetch=FAR)


def step_with_cancelled_offloads(program: Program) -> None:
    _train(program, window=FAR, prefetch=FAR)


def step_with_little_host_memory(program: Program) -> None:
    _train(program, window=NBYTES, prefetch=2 * NBYTES, budget=3 * NBYTES)


def interleaved_microbatches(program: Program) -> None:
    engine, weight = program.make_engine(window=2 * NBYTES, prefetch=4 * NBYTES), program.leaf()
    for _ in range(2):  # the second step knows the order of the first
        first = run_layers(program, Sites(engine), weight)
        for microbatch in range(1, 4):
            second = run_layers(program, Sites(engine, microbatch=microbatch), weight)
            program.backward(first)
            first = second
        program.finish(first, weight=weight)


def changing_order_of_backwards(program: Program) -> None:
    engine, weight = program.make_engine(prefetch=FAR), program.leaf()
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        outputs = [run_layers(program, Sites(engine, microbatch=number), weight) for number in range(3)]
        for number in order:
            program.backward(outputs[number])
            outputs[number] = None
        program.results.append(weight.grad.clone())


def two_engines_on_one_device(program: Program) -> None:
    engines, weight = [program.make_engine(prefetch=FAR) for _ in range(2)], program.leaf()
    outputs = [run_layers(program, Sites(engine), weight) for engine in engines]
    for output in outputs:
        program.finish(output, weight=weight)


def retained_graph(program: Program) -> None:
    engine, weight = program.make_engine(prefetch=2 * NBYTES), program.leaf()
    output = run_layers(program, Sites(engine), weight)
    program.backward(output, retain_graph=True)
    program.finish(output, weight=weight)


def gathered_sparse_views(program: Program) -> None:
    _, weight, sites = program.begin(window=FAR, prefetch=FAR)
    h = program.run(lambda w: w * 2, weight)
    output = sites(program.wrap(sine_of_columns), h)
    del h
    output = sites(program.wrap(sine), output)
    program.finish(output, weight=weight)


# Dropped graphs or skipped branches, whose buffers nobody uses.


def graph_dropped_during_its_reloads(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR)
    output = run_layers(program, sites, weight)
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    if engine:
        engine.finish_step()


def block_reused_by_the_next_microbatch_while_it_is_read(program: Program) -> None:
    engine, weight = program.make_engine(prefetch=FAR, budget=NBYTES), program.leaf()
    for _ in range(2):
        sites = Sites(engine)
        output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
        if engine:
            engine.approach_backward(sites.lane, sites.lane.groups[-1])
        del output


def block_split_while_it_is_read(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR, budget=NBYTES)
    output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    sites = Sites(engine)
    halves = [sites(program.wrap(sine), program.run(lambda w: w[::2] * 2, weight)) for _ in range(2)]
    program.finish(*halves, weight=weight)


def block_returned_unwritten_while_it_is_read(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR, budget=NBYTES)
    output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    if engine:
        h, changed = (program.run(lambda w: w * 2, weight) for _ in range(2))
        sites = Sites(engine)
        with contextlib.suppress(StateError):  # the second storage is rejected after the first has its block
            sites(lambda h: (h.sin(), changed.sin(), changed.detach().add_(1)), h, output=lambda results: results[0])
        del h, changed
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    program.finish(output, weight=weight)


def branch_of_a_retained_graph_skipped_by_backward(program: Program) -> None:
    _, weight, sites = program.begin(prefetch=FAR)
    h = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    h = sites(program.wrap(sine), h)
    branch = sites(program.wrap(square), program.run(lambda h: h * 3, h))
    h = sites(program.wrap(sine), program.run(lambda h: h * 5, h))
    program.backward(h, retain_graph=True)
    program.finish(branch, weight=weight)


def close_before_backward(program: Program) -> None:
    engine, weight = program.make_engine(window=NBYTES, prefetch=NBYTES), program.leaf()
    output = run_layers(program, Sites(engine), weight)
    if engine:
        engine.close()
    program.finish(output, weight=weight)


def views_gathered_for_a_rejected_group(program: Program) -> None:
    engine, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    if engine:
        changed, rejected = program.run(lambda w: w * 3, weight), []

        def save_both(h: torch.Tensor) -> torch.Tensor:
            rejected.append((h[:, ::8].sin(), changed.sin(), changed.detach().add_(1)))
            return rejected[0][0]

        with contextlib.suppress(StateError):  # the second storage is rejected after the first was chosen for a gather
            sites(save_both, h)
    output = sites(program.wrap(sine), h)  # saves all of `h`, whose columns are saved, too
    program.finish(output, weight=weight)


def engine_dropped_without_close(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR)
    output = run_layers(program, sites, weight)
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output, engine, sites
    program.forget_engines()


SINGLE_STREAM_SCHEDULES = (
    step_without_prefetch,
    step_with_small_window_and_prefetch,
    step_with_unlimited_prefetch,
    step_with_cancelled_offloads,
    step_with_little_host_memory,
    interleaved_microbatches,
    changing_order_of_backwards,
    two_engines_on_one_device,
    retained_graph,
    gathered_sparse_views,
    graph_dropped_during_its_reloads,
    block_reused_by_the_next_microbatch_while_it_is_read,
    block_split_while_it_is_read,
    block_returned_unwritten_while_it_is_read,
    branch_of_a_retained_graph_skipped_by_backward,
    close_before_backward,
    views_gathered_for_a_rejected_group,
    engine_dropped_without_close,
)
