"""Small runs on several streams, whose accesses the engine's waits must order."""

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


def region_on_another_stream(program: Program) -> None:
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


def storage_saved_on_two_streams(program: Program) -> None:
    _, weight, sites = program.begin(window=NBYTES)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)  # the same storage, whose offload is in flight
    del h
    third = sites(program.wrap(sine), first)  # exceeds the window, so compute waits for the copy and the source is freed
    program.finish(second, third, weight=weight, joins="side")


def storage_saved_on_two_streams_whose_copy_the_host_sees_done(program: Program) -> None:
    _, weight, sites = program.begin(window=FAR)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h
    program.device.synchronize(program.device.record_event(program.device.d2h_stream))
    third = sites(program.wrap(sine), first)  # the host has seen the copy as done, but not the other stream's kernel
    program.finish(second, third, weight=weight, joins="side")


def close_while_a_storage_saved_on_two_streams_is_offloaded(program: Program) -> None:
    engine, weight, sites = program.begin(window=FAR)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h
    if engine:
        engine.close()
    program.finish(first, second, weight=weight, joins="side")


def block_of_another_stream_reused_while_it_is_read(program: Program) -> None:
    engine, weight, device = program.make_engine(prefetch=FAR, budget=NBYTES), program.leaf(), program.device
    device.join("side", "compute")
    with device.on("side"):
        sites = Sites(engine)
        output = sites(program.wrap(sine), program.run(lambda w: w * 2, weight))
        if engine:
            engine.approach_backward(sites.lane, sites.lane.groups[-1])
        del output  # the copy to the device still reads the block
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))  # reuses the block
    program.finish(output, weight=weight, joins="side")


def graph_of_another_stream_dropped_during_its_offload(program: Program) -> None:
    engine, weight, device = program.make_engine(window=NBYTES), program.leaf(), program.device
    device.join("side", "compute")
    with device.on("side"):
        output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
        del output  # the copy to the host still reads memory of the side stream
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))  # exceeds the window
    program.finish(output, weight=weight, joins="side")


def watched_save_on_another_stream(program: Program) -> None:
    _, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    with sites.watched():
        watched = program.on("side", square)(h)
    output = sites(program.wrap(sine), h)
    del h
    program.finish(output, watched, weight=weight, joins="side")


def gather_beside_a_gather_from_another_stream(program: Program) -> None:
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


def gather_from_a_source_of_another_stream(program: Program) -> None:
    engine, weight, sites = program.begin(window=FAR)
    program.device.join("side", "compute")
    with program.device.on("side"):
        h = program.run(lambda w: w * 2, weight)
        columns = sites(program.wrap(sine_of_columns), h, is_held=True)
        del h
    if engine:
        engine.flush()  # gathers on the compute stream, and frees the source, which the side stream owns
    program.finish(columns, weight=weight, joins="side")


def storage_saved_again_on_another_stream_after_its_offload(program: Program) -> None:
    _, weight, sites = program.begin()
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    second = sites(program.on("side", square), h)
    del h  # unlike a graph, the engine no longer references it
    program.finish(first, second, weight=weight, joins="side")


def storage_offloaded_again_from_another_stream(program: Program) -> None:
    _, weight, sites = program.begin(window=0)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    program.device.join("side", "compute")
    with program.device.on("side"):
        second = sites(program.wrap(square), h)  # offloaded again from here, but the compute stream owns the memory
    del h
    program.finish(first, second, weight=weight, joins="side")


def storage_read_on_another_stream_during_its_offload(program: Program) -> None:
    _, weight, sites = program.begin(window=NBYTES)
    h = program.run(lambda w: w * 2, weight)
    first = sites(program.wrap(sine), h)
    del h
    program.device.join("side", "compute")
    with program.device.on("side"):
        read(first.grad_fn._saved_self)
    second = sites(program.wrap(sine), first)  # exceeds the window
    program.finish(second, weight=weight, joins="side")


def close_after_another_stream_read_an_offloading_storage(program: Program) -> None:
    engine, weight, device = program.make_engine(window=FAR), program.leaf(), program.device
    first = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    device.join("side", "compute")
    with device.on("side"):
        read(first.grad_fn._saved_self)
    if engine:
        engine.close()  # frees the source, which the compute stream owns
    program.finish(first, weight=weight, joins="side")


def close_with_copies_beyond_the_window_in_flight(program: Program) -> None:
    engine, weight = program.make_engine(window=0), program.leaf()
    output = Sites(engine)(program.wrap(sine), program.run(lambda w: w * 2, weight))
    del output  # so that no block is in use, and closing frees the host memory


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


def buffer_used_on_another_stream(program: Program) -> None:
    with _reached(program, sine) as (_, results), program.device.on("side"):
        read(results[0].grad_fn._saved_self)


def buffer_of_a_retained_graph_used_on_another_stream(program: Program) -> None:
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
        engine.approach_backward(lane, lane.groups[0])  # drops the last group
        engine.leave_backward(lane, lane.groups[0])
    program.device.join("compute", "side")


def gathered_views_used_on_two_streams(program: Program) -> None:
    device = program.device
    with _reached(program, sine_and_cosine_of_columns) as (_, results):
        read(results[0][0].grad_fn._saved_self)  # scatters them
        with device.on("side"):
            read(results[0][1].grad_fn._saved_self)


def gathered_views_scattered_on_another_stream(program: Program) -> None:
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
    """Returns its saved tensor as the gradient, like a loss that computes its gradient in forward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def saved_tensor_as_gradient_on_another_stream(program: Program) -> None:
    _, weight, sites = program.begin(prefetch=FAR)
    program.device.join("side", "compute")
    with program.device.on("side"):
        h = sites(program.wrap(_ReturnSaved.apply), program.run(lambda w: w * 2, weight))
    program.device.join("compute", "side")
    program.device.record_stream(h, "compute")
    h = sites(program.wrap(sine), program.run(lambda h: h * 3, h))  # its hooks prefetch on the compute stream
    program.finish(h, weight=weight)


MULTI_STREAM_SCHEDULES = (
    storage_offloaded_again_from_another_stream,
    region_on_another_stream,
    storage_saved_on_two_streams,
    storage_saved_on_two_streams_whose_copy_the_host_sees_done,
    close_while_a_storage_saved_on_two_streams_is_offloaded,
    block_of_another_stream_reused_while_it_is_read,
    graph_of_another_stream_dropped_during_its_offload,
    watched_save_on_another_stream,
    gather_beside_a_gather_from_another_stream,
    buffer_used_on_another_stream,
    buffer_of_a_retained_graph_used_on_another_stream,
    gathered_views_used_on_two_streams,
    gathered_views_scattered_on_another_stream,
    branches_on_three_streams,
    gather_from_a_source_of_another_stream,
    storage_saved_again_on_another_stream_after_its_offload,
    storage_read_on_another_stream_during_its_offload,
    close_with_copies_beyond_the_window_in_flight,
    saved_tensor_as_gradient_on_another_stream,
    close_after_another_stream_read_an_offloading_storage,
)
