"""Tests that tensors saved by captured graphs are offloaded between replays, and reloaded before their backward."""

import itertools

import pytest
import torch
from support.graphs import CpuGraph, GraphDevice, GraphedLayer, GraphPool, attention, capture_layers, plain
from support.sites import Sites, make_engine

from fgoffload import StateError, TransferPolicy

pytestmark = pytest.mark.quick

ROWS, LAYERS = 8, 5
SAVED_BYTES = {"core_attn": 2 * ROWS * ROWS * 4, "attn_proj": ROWS * ROWS * 4}
"""Per layer."""


def make_weights():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, ROWS, generator=generator).div_(3).requires_grad_() for _ in range(LAYERS)]


def make_inputs(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, ROWS, generator=generator) for _ in range(count)]


def run_eager(inputs):
    weights = make_weights()
    for hidden in inputs:
        for weight in weights:
            hidden = attention(hidden, weight, plain)
        hidden.square().sum().backward()
    return [weight.grad for weight in weights]


class Model:
    def __init__(self, engine, *, layer=attention):
        self.weights, self.pool = make_weights(), GraphPool()
        self.layers = [GraphedLayer(engine, self.pool, layer, weight, make_inputs(1)[0]) for weight in self.weights]
        capture_layers(engine, self.layers)

    def __call__(self, hidden):
        self.pool.poison()
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def step(self, inputs):
        for hidden in inputs:
            output = self(hidden)
            self.pool.poison()
            output.square().sum().backward()
        gradients = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return gradients


def check_same(found, expected):
    assert all(map(torch.equal, found, expected))


def test_graph_replays_with_offload_are_bitwise_identical_to_eager_training():
    engine = make_engine(GraphDevice())
    model = Model(engine)
    assert model.pool.poison() >= LAYERS * sum(SAVED_BYTES.values())  # other graphs may use the freed memory
    for _ in range(2):
        check_same(model.step(make_inputs(3)), run_eager(make_inputs(3)))
        tags = engine.finish_step().tags
        for tag, size_bytes in SAVED_BYTES.items():
            # The slots still contain the tensors of the last two forward layers.
            assert tags[tag].d2h_bytes == tags[tag].h2d_bytes == 3 * (LAYERS - 2) * size_bytes
            assert tags[tag].recalled_bytes == 3 * 2 * size_bytes
        # The tensors of each layer are prefetched during the previous backward.
        assert tags["core_attn"].prefetch_misses == 0


def test_overlapping_microbatches_do_not_mix_their_saved_tensors():
    engine = make_engine(GraphDevice())
    weights, pool = make_weights(), GraphPool()
    inputs = make_inputs(2)
    stacks = [[GraphedLayer(engine, pool, attention, weight, inputs[0]) for weight in weights] for _ in inputs]
    for stack in stacks:
        capture_layers(engine, stack)
    outputs = []
    for stack, hidden in zip(stacks, inputs, strict=True):  # not in the order of the capture
        for layer in stack:
            hidden = layer(hidden)
        outputs.append(hidden)
    pool.poison()
    for output in outputs:
        output.square().sum().backward()
    check_same([weight.grad for weight in weights], run_eager(inputs))


def test_a_forward_without_a_backward_leaks_no_host_memory():
    engine = make_engine(GraphDevice())
    model = Model(engine)
    output = model(make_inputs(1)[0])
    del output
    check_same(model.step(make_inputs(2)), run_eager(make_inputs(2)))
    assert engine.finish_step().host_bytes == 0


def test_storages_that_are_referenced_elsewhere_stay_on_the_gpu():
    referenced = []

    def layer(hidden, weight, find_region):
        with find_region("core_attn"):
            projected = hidden @ weight
            output = projected.sin() * projected
        referenced.append(projected)
        return output

    engine = make_engine(GraphDevice())
    Model(engine, layer=layer)
    tag = engine.finish_step().tags["core_attn"]
    assert tag.d2h_bytes == 0
    assert "something else still references its storage" in tag.kept_bytes


def test_a_saved_tensor_object_that_is_still_referenced_stays_on_the_gpu():
    referenced = []

    def layer(hidden, weight, find_region):
        with find_region("core_attn"), torch.no_grad():
            mask = (hidden > 0).to(hidden.dtype)
        referenced.append(mask)  # the same object that is saved
        with find_region("core_attn"):
            return (hidden @ weight) * mask

    engine = make_engine(GraphDevice())
    model = Model(engine, layer=layer)
    assert all(captured.forward is None for captured in model.layers)


@pytest.mark.parametrize("eager_runs", [0, LAYERS], ids=["in every run", "only during capture"])
def test_an_in_place_change_after_a_save_in_a_graph_raises(eager_runs):
    runs = itertools.count()

    def layer(hidden, weight, find_region):
        with find_region("core_attn"):
            projected = hidden @ weight
            output = projected.sin()
        if next(runs) >= eager_runs:
            projected.add_(1)
        return output

    with pytest.raises(StateError, match="was changed in place before backward used it"):
        Model(make_engine(GraphDevice()), layer=layer)


def test_tensors_saved_on_a_side_stream_of_the_graph_stay_on_the_gpu():
    engine = make_engine(GraphDevice())

    def layer(hidden, weight, find_region):
        projected = hidden @ weight
        with find_region("core_attn"), engine.device.on("side"):
            return projected.sin()

    assert all(captured.forward is None for captured in Model(engine, layer=layer).layers)


def test_sites_that_the_warm_up_skipped_stay_on_the_gpu():
    runs = itertools.count()

    def layer(hidden, weight, find_region):
        if next(runs) < LAYERS:  # the warm-up saves only half
            with find_region("core_attn"):
                return (hidden @ weight).sin()
        return attention(hidden, weight, find_region)

    engine = make_engine(GraphDevice())
    model = Model(engine, layer=layer)
    check_same(model.step(make_inputs(1)), run_eager(make_inputs(1)))
    assert engine.finish_step().tags["core_attn"].groups == LAYERS
    assert {captured.forward.size_bytes for captured in model.layers} == {ROWS * ROWS * 4 + (-ROWS * ROWS * 4) % 512}


def test_a_reloaded_tensor_whose_slot_was_overwritten_is_reloaded_again():
    engine = make_engine(GraphDevice())
    weights, pool, inputs = make_weights(), GraphPool(), make_inputs(2)
    stacks = [[GraphedLayer(engine, pool, attention, weight, inputs[0]) for weight in weights] for _ in inputs]
    capture_layers(engine, *stacks)

    def run(layers, hidden):
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    halfway = run(stacks[0][:2], inputs[0])
    outputs = [run(stacks[0][2:], halfway), run(stacks[1], inputs[1])]
    first = [*torch.autograd.grad(outputs[0].square().sum(), (halfway, *weights[2:]))]
    again = run(stacks[1], inputs[1])  # before the backward of the first two layers
    halfway.backward(first[0])
    again.square().sum().backward()
    for weight, gradient in zip(weights[2:], first[1:], strict=True):
        weight.grad += gradient
    check_same([weight.grad for weight in weights[:2]], run_eager(inputs)[:2])


def test_is_copying_out_covers_copies_from_graph_slots():
    engine = make_engine(GraphDevice())
    Model(engine)(make_inputs(1)[0])
    assert engine.is_copying_out()
    engine.device.synchronize(engine.device.record_event(engine.device.d2h_stream))
    assert not engine.is_copying_out()


def test_a_host_budget_that_is_too_small_raises_state_error():
    model = Model(make_engine(GraphDevice(), host_budget_bytes=512))
    with pytest.raises(StateError, match="but the host budget is used up"):
        model(make_inputs(1)[0])


def run_step(engine, weights, inputs):
    """Return the gradients of `weights` summed over all `inputs`, with two sites per layer."""
    total = [torch.zeros_like(weight) for weight in weights]
    for microbatch, hidden in enumerate(inputs):
        sites = Sites(engine, microbatch=microbatch)
        for weight in weights:
            output = sites(lambda hidden, weight=weight: attention(hidden, weight, plain), hidden)
            hidden = sites(torch.mul, output, hidden)  # saves a tensor that the previous site has offloaded
        if engine is not None:
            engine.expect_backward(sites.lane)
        for sum_, gradient in zip(total, torch.autograd.grad(hidden.square().sum(), weights), strict=True):
            sum_ += gradient
    return total


@pytest.mark.parametrize("window_bytes", [0, 1 << 20], ids=["no window", "large window"])
def test_replaying_a_captured_step_repeats_its_copies(window_bytes):
    policy = TransferPolicy(window_bytes=window_bytes, prefetch_bytes=1 << 10)
    engine, weights, pool = make_engine(GraphDevice(), policy=policy), make_weights(), GraphPool()
    static = [torch.zeros(ROWS, ROWS) for _ in range(2)]
    run_step(engine, weights, static)  # allocates the host memory of a step
    engine.finish_step()
    graph = CpuGraph(pool)
    with engine.capture_step(), engine.device.capturing(), graph:
        gradients = run_step(engine, weights, static)
        stats = engine.finish_step()
    assert stats.d2h_bytes > 0
    assert (stats.h2d_bytes > 0) == (window_bytes == 0)  # otherwise all tensors were still on the device when backward began
    pool.release()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(ROWS, ROWS, generator=generator) for _ in static]
        for buffer, hidden in zip(static, inputs, strict=True):
            buffer.copy_(hidden)
        pool.poison()
        graph.replay()
        check_same(gradients, run_step(None, weights, inputs))
    check_same(run_step(engine, weights, inputs), gradients)  # eagerly, with the host memory of the graph
    engine.close()


def test_capturing_allocates_no_host_memory():
    engine, weights = make_engine(GraphDevice()), make_weights()
    with engine.capture_step(), engine.device.capturing():
        run_step(engine, weights, make_inputs(1))
        stats = engine.finish_step()
    assert stats.d2h_bytes == stats.host_reserved_bytes == 0
    assert list(stats.tags["core_attn"].kept_bytes) == ["the host budget is used up"]
