"""Small runs on several streams, with accesses that one or more of the engine's waits must order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fgoffload.engine import OffloadEngine
from support.schedules import sine, sine_of_columns, square
from support.sites import Sites
from support.streams import FAR, NBYTES, Function, Program


def sine_and_cosine_of_columns(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return h[:, ::8].sin(), h[:, ::8].cos()


def read(saved: torch.Tensor) -> None:
    """Queue a kernel that reads `saved` on the current stream."""
    saved.neg()


# Forward.


def a_region_on_another_stream(program: Program) -> None:
    engine, weight, sites = program.begin(prefetch=FAR)
    program.device.join("side", "compute")
    with program.device.on("side"):
        h = program.run(lambda w: w * 2, weight)
        h = sites(program.wrap(sine), h, is_held=True)
    if engine:
        engine.flush()
    with program.device.on("side"):
        h = sites(program.wrap(sine), h)
    program.finish(h, weight=weight, joins="side")


def a_storage_that_two_streams_save(program: Program) -> None:
    _, weight, sites = program.begin(window=NBYTES)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)  # the same storage, whose copy is under way
    del h
    third = sites(program.wrap(sine), first)  # past the window, so that the copy is waited for and its source goes
    program.finish(second, third, weight=weight, joins="side")


def a_storage_that_two_streams_save_whose_copy_the_host_sees_done(program: Program) -> None:
    _, weight, sites = program.begin(window=FAR)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h
    program.device.synchronize(program.device.record_event(program.device.d2h_stream))
    third = sites(program.wrap(sine), first)  # the host has seen the copy done, and not the other stream's kernel
    program.finish(second, third, weight=weight, joins="side")


def closing_while_a_storage_that_two_streams_save_leaves(program: Program) -> None:
    engine, weight, sites = program.begin(window=FAR)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h
    if engine:
        engine.close()
    program.finish(first, second, weight=weight, joins="side")


def a_block_of_another_stream_that_goes_on_while_it_is_read(program: Program) -> None:
    engine, weight, device = program.make_engine(prefetch=FAR, budget=NBYTES), program.leaf(), program.device
    device.join("side", "compute")
    with device.on("side"):
        sites = Sites(engine)
        output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
        if engine:
            engine.approach_backward(sites.lane, sites.lane.groups[-1])
        del output  # the copy to the device still reads the block
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))  # gets the block
    program.finish(output, weight=weight, joins="side")


def a_graph_of_another_stream_that_is_dropped_while_it_leaves(program: Program) -> None:
    engine, weight, device = program.make_engine(window=NBYTES), program.leaf(), program.device
    device.join("side", "compute")
    with device.on("side"):
        output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
        del output  # the copy to the host still reads what the side stream owns
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))  # past the window
    program.finish(output, weight=weight, joins="side")


def a_watched_save_on_another_stream(program: Program) -> None:
    _, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    with sites.watched():
        watched = program.on("side", square)(h)
    output = sites(program.wrap(sine), h)
    del h
    program.finish(output, watched, weight=weight, joins="side")


def gathering_what_another_stream_saves(program: Program) -> None:
    engine, weight, sites = program.begin(window=FAR)
    h = program.run(lambda w: w * 2, weight)
    program.device.join("side", "compute")
    with program.device.on("side"):
        g = program.run(lambda w: w * 3, weight)
        columns = sites(program.wrap(sine_of_columns), g, is_held=True)
    other = sites(program.wrap(sine_of_columns), h, is_held=True)
    if engine:
        engine.flush()
    del h
    program.finish(columns, other, weight=weight, joins="side")
    del g


def gathering_a_source_of_another_stream(program: Program) -> None:
    engine, weight, sites = program.begin(window=FAR)
    program.device.join("side", "compute")
    with program.device.on("side"):
        h = program.run(lambda w: w * 2, weight)
        columns = sites(program.wrap(sine_of_columns), h, is_held=True)
        del h
    if engine:
        engine.flush()  # gathers on the compute stream, and drops the source, which is the side stream's
    program.finish(columns, weight=weight, joins="side")


def a_storage_saved_again_on_another_stream_after_it_left(program: Program) -> None:
    _, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h  # the engine does not hold it any more, as the graph would
    program.finish(first, second, weight=weight, joins="side")


def a_storage_that_a_region_of_another_stream_saves_again_after_it_left(program: Program) -> None:
    _, weight, sites = program.begin(window=0)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    program.device.join("side", "compute")
    with program.device.on("side"):
        second = sites(program.wrap(square), h)  # leaves again, from here; the memory is the compute stream's all the same
    del h
    program.finish(first, second, weight=weight, joins="side")


def a_storage_that_another_stream_looks_at_while_it_leaves(program: Program) -> None:
    _, weight, sites = program.begin(window=NBYTES)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    del h
    program.device.join("side", "compute")
    with program.device.on("side"):
        read(first.grad_fn._saved_self)
    second = sites(program.wrap(sine), first)  # past the window
    program.finish(second, weight=weight, joins="side")


def closing_after_another_stream_looked_at_what_leaves(program: Program) -> None:
    engine, weight, device = program.make_engine(window=FAR), program.leaf(), program.device
    first = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    device.join("side", "compute")
    with device.on("side"):
        read(first.grad_fn._saved_self)
    if engine:
        engine.close()  # lets go of the source, which is the compute stream's
    program.finish(first, weight=weight, joins="side")


def closing_while_copies_past_the_window_are_under_way(program: Program) -> None:
    engine, weight = program.make_engine(window=0), program.leaf()
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    del output  # so that no block is in use, and closing gives the host memory back


# Backward.


@contextlib.contextmanager
def _reached(program: Program, function: Function, *, prefetch: int = 0) -> Iterator[tuple[OffloadEngine | None, Any]]:
    """Yield the outputs of a site that backward has reached on the compute stream, and drop them at the end."""
    engine, weight, sites = program.begin(prefetch=prefetch)
    results = [
        sites(
            program.wrap(function),
            program.run(lambda w: w * 2, weight),
            output=lambda result: result[0] if isinstance(result, tuple) else result,
        )
    ]
    program.device.join("side", "compute")
    program.device.record_all_streams()
    if engine:
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    yield engine, results
    results.clear()
    if engine:
        engine.finish_step()


def a_buffer_that_another_stream_takes(program: Program) -> None:
    with _reached(program, sine) as (_, results), program.device.on("side"):
        read(results[0].grad_fn._saved_self)


def a_buffer_of_a_kept_graph_that_another_stream_takes(program: Program) -> None:
    engine, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    outputs = [h]
    for _ in range(3):
        outputs.append(sites(program.wrap(sine), outputs[-1]))
    del h
    if engine:
        lane = sites.lane
        engine.approach_backward(lane, lane.groups[2])
        with program.device.on("side"):
            read(outputs[3].grad_fn._saved_self)
        engine.approach_backward(lane, lane.groups[1])
        engine.approach_backward(lane, lane.groups[0])  # leaves the last group for good
        engine.leave_backward(lane, lane.groups[0])
    program.device.join("compute", "side")


def gathered_views_that_two_streams_take(program: Program) -> None:
    device = program.device
    with _reached(program, sine_and_cosine_of_columns) as (_, results):
        read(results[0][0].grad_fn._saved_self)  # puts them in place
        with device.on("side"):
            read(results[0][1].grad_fn._saved_self)


def gathered_views_that_another_stream_puts_in_place(program: Program) -> None:
    device = program.device
    with _reached(program, sine_of_columns) as (_, results), device.on("side"):
        read(results[0].grad_fn._saved_self)


def branches_on_three_streams(program: Program) -> None:
    _, weight, sites = program.begin(window=NBYTES, prefetch=4 * NBYTES)
    h = program.run(lambda w: w * 2, weight)
    for _ in range(3):
        h = sites(program.wrap(sine), h)
        branches = []
        for stream in ("side", "third"):
            branch = program.on(stream, lambda h: h * 3)(h)
            program.device.record_stream(h, stream)
            program.device.join(stream, "compute")
            with program.device.on(stream):
                branches.append(sites(program.wrap(square), branch))
            del branch
        for branch, stream in zip(branches, ("side", "third"), strict=True):
            program.device.join("compute", stream)
            program.device.record_stream(branch, "compute")
        h = program.run(lambda a, b: a + b, *branches)
        branches.clear()
    program.finish(h, weight=weight)


class _ReturnSaved(torch.autograd.Function):
    """Its gradient is the tensor that it saved, as where a loss computes its gradient in forward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def a_gradient_that_is_what_was_saved_on_another_stream(program: Program) -> None:
    _, weight, sites = program.begin(prefetch=FAR)
    program.device.join("side", "compute")
    with program.device.on("side"):
        h = sites(program.wrap(_ReturnSaved.apply), program.run(lambda w: w * 2, weight))
    program.device.join("compute", "side")
    program.device.record_stream(h, "compute")
    h = sites(program.wrap(sine), program.run(lambda h: h * 3, h))  # its marks prefetch on the compute stream
    program.finish(h, weight=weight)


ON_SEVERAL_STREAMS = (
    a_storage_that_a_region_of_another_stream_saves_again_after_it_left,
    a_region_on_another_stream,
    a_storage_that_two_streams_save,
    a_storage_that_two_streams_save_whose_copy_the_host_sees_done,
    closing_while_a_storage_that_two_streams_save_leaves,
    a_block_of_another_stream_that_goes_on_while_it_is_read,
    a_graph_of_another_stream_that_is_dropped_while_it_leaves,
    a_watched_save_on_another_stream,
    gathering_what_another_stream_saves,
    a_buffer_that_another_stream_takes,
    a_buffer_of_a_kept_graph_that_another_stream_takes,
    gathered_views_that_two_streams_take,
    gathered_views_that_another_stream_puts_in_place,
    branches_on_three_streams,
    gathering_a_source_of_another_stream,
    a_storage_saved_again_on_another_stream_after_it_left,
    a_storage_that_another_stream_looks_at_while_it_leaves,
    closing_while_copies_past_the_window_are_under_way,
    a_gradient_that_is_what_was_saved_on_another_stream,
    closing_after_another_stream_looked_at_what_leaves,
)
