"""Small single-stream runs, with accesses that one or more of the engine's waits must order."""

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


def a_step_with_nothing_ahead(program: Program) -> None:
    _train(program, window=0, prefetch=0)


def a_step_with_a_little_ahead(program: Program) -> None:
    _train(program, window=3 * NBYTES, prefetch=2 * NBYTES)


def a_step_with_everything_ahead(program: Program) -> None:
    _train(program, window=0, prefetch=FAR)


def a_step_whose_groups_are_recalled(program: Program) -> None:
    _train(program, window=FAR, prefetch=FAR)


def a_step_with_little_host_memory(program: Program) -> None:
    _train(program, window=NBYTES, prefetch=2 * NBYTES, budget=3 * NBYTES)


def two_microbatches_in_turn(program: Program) -> None:
    engine, weight = program.make_engine(window=2 * NBYTES, prefetch=4 * NBYTES), program.leaf()
    for _ in range(2):  # the second one knows the order of the first
        first = run_layers(program, Sites(engine), weight)
        for microbatch in range(1, 4):
            second = run_layers(program, Sites(engine, microbatch=microbatch), weight)
            program.backward(first)
            first = second
        program.finish(first, weight=weight)


def an_order_of_backwards_that_changes(program: Program) -> None:
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


def a_graph_that_is_kept(program: Program) -> None:
    engine, weight = program.make_engine(prefetch=2 * NBYTES), program.leaf()
    output = run_layers(program, Sites(engine), weight)
    program.backward(output, retain_graph=True)
    program.finish(output, weight=weight)


def sparse_views_that_are_gathered(program: Program) -> None:
    _, weight, sites = program.begin(window=FAR, prefetch=FAR)
    h = program.run(lambda w: w * 2, weight)
    output = sites(program.wrap(sine_of_columns), h)
    del h
    output = sites(program.wrap(sine), output)
    program.finish(output, weight=weight)


# A graph that is dropped, or a branch that backward leaves out, with buffers that nobody took.


def a_graph_dropped_with_its_buffers_on_their_way(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR)
    output = run_layers(program, sites, weight)
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    if engine:
        engine.finish_step()


def a_block_that_goes_to_the_next_microbatch_while_it_is_read(program: Program) -> None:
    engine, weight = program.make_engine(prefetch=FAR, budget=NBYTES), program.leaf()
    for _ in range(2):
        sites = Sites(engine)
        output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
        if engine:
            engine.approach_backward(sites.lane, sites.lane.groups[-1])
        del output


def a_block_that_is_cut_in_two_while_it_is_read(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR, budget=NBYTES)
    output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    sites = Sites(engine)
    halves = [sites(program.wrap(sine), program.run(lambda w: w[::2] * 2, weight)) for _ in range(2)]
    program.finish(*halves, weight=weight)


def a_block_that_comes_back_unwritten_while_it_is_read(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR, budget=NBYTES)
    output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output
    if engine:
        h, changed = (program.run(lambda w: w * 2, weight) for _ in range(2))
        sites = Sites(engine)
        with contextlib.suppress(StateError):  # the second storage is refused when the first has got its block
            sites(lambda h: (h.sin(), changed.sin(), changed.detach().add_(1)), h, output=lambda results: results[0])
        del h, changed
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    program.finish(output, weight=weight)


def a_branch_of_a_kept_graph_that_backward_leaves_out(program: Program) -> None:
    _, weight, sites = program.begin(prefetch=FAR)
    h = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
    h = sites(program.wrap(sine), h)
    branch = sites(program.wrap(square), program.run(lambda h: h * 3, h))
    h = sites(program.wrap(sine), program.run(lambda h: h * 5, h))
    program.backward(h, retain_graph=True)
    program.finish(branch, weight=weight)


def closing_while_a_graph_wants_its_bytes_back(program: Program) -> None:
    engine, weight = program.make_engine(window=NBYTES, prefetch=NBYTES), program.leaf()
    output = run_layers(program, Sites(engine), weight)
    if engine:
        engine.close()
    program.finish(output, weight=weight)


def views_gathered_for_a_group_that_was_refused(program: Program) -> None:
    engine, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    if engine:
        changed, refused = program.run(lambda w: w * 3, weight), []

        def save_both(h: torch.Tensor) -> torch.Tensor:
            refused.append((h[:, ::8].sin(), changed.sin(), changed.detach().add_(1)))
            return refused[0][0]

        with contextlib.suppress(StateError):  # the second storage is refused when the first is set to be gathered
            sites(save_both, h)
    output = sites(program.wrap(sine), h)  # saves all of it, while those columns are saved too
    program.finish(output, weight=weight)


def an_engine_dropped_without_closing(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR)
    output = run_layers(program, sites, weight)
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output, engine, sites
    program.forget_engines()


ON_ONE_STREAM = (
    a_step_with_nothing_ahead,
    a_step_with_a_little_ahead,
    a_step_with_everything_ahead,
    a_step_whose_groups_are_recalled,
    a_step_with_little_host_memory,
    two_microbatches_in_turn,
    an_order_of_backwards_that_changes,
    two_engines_on_one_device,
    a_graph_that_is_kept,
    sparse_views_that_are_gathered,
    a_graph_dropped_with_its_buffers_on_their_way,
    a_block_that_goes_to_the_next_microbatch_while_it_is_read,
    a_block_that_is_cut_in_two_while_it_is_read,
    a_block_that_comes_back_unwritten_while_it_is_read,
    a_branch_of_a_kept_graph_that_backward_leaves_out,
    closing_while_a_graph_wants_its_bytes_back,
    views_gathered_for_a_group_that_was_refused,
    an_engine_dropped_without_closing,
)
