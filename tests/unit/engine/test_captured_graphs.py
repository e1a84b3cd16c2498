"""What captured graphs save leaves between replays and is back for their backward, whatever happens to the graphs' memory."""

import pytest
import torch
from support.graphs import GraphDevice, GraphedLayer, GraphPool, attention, capture_layers, plain
from support.sites import make_engine

from fgoffload import StateError

pytestmark = pytest.mark.quick

ROWS, LAYERS = 8, 5
SAVED_BYTES = {"core_attn": 2 * ROWS * ROWS * 4, "attn_proj": ROWS * ROWS * 4}
"""Of a layer."""


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


def test_replays_with_offload_give_the_bits_of_eager_training():
    engine = make_engine(GraphDevice())
    model = Model(engine)
    assert model.pool.poison() >= LAYERS * sum(SAVED_BYTES.values())  # the memory of what left is free for other graphs
    for _ in range(2):
        check_same(model.step(make_inputs(3)), run_eager(make_inputs(3)))
        tags = engine.finish_step().tags
        for tag, size_bytes in SAVED_BYTES.items():
            # The slots still have what the last two layers of forward left there.
            assert tags[tag].d2h_bytes == tags[tag].h2d_bytes == 3 * (LAYERS - 2) * size_bytes
            assert tags[tag].recalled_bytes == 3 * 2 * size_bytes
        # Each backward but the first behind the slots is brought back while the one before it runs.
        assert tags["core_attn"].prefetch_misses == 0


def test_microbatches_that_overlap_keep_their_own_bytes():
    engine = make_engine(GraphDevice())
    weights, pool = make_weights(), GraphPool()
    inputs = make_inputs(2)
    stacks = [[GraphedLayer(engine, pool, attention, weight, inputs[0]) for weight in weights] for _ in inputs]
    for stack in stacks:
        capture_layers(engine, stack)
    outputs = []
    for stack, hidden in zip(stacks, inputs, strict=True):  # another order than that of the capture
        for layer in stack:
            hidden = layer(hidden)
        outputs.append(hidden)
    pool.poison()
    for output in outputs:
        output.square().sum().backward()
    check_same([weight.grad for weight in weights], run_eager(inputs))


def test_a_forward_whose_backward_never_comes_leaves_nothing_behind():
    engine = make_engine(GraphDevice())
    model = Model(engine)
    del_me = model(make_inputs(1)[0])
    del del_me
    check_same(model.step(make_inputs(2)), run_eager(make_inputs(2)))
    assert engine.finish_step().host_bytes == 0


def test_what_something_else_holds_stays():
    held = []

    def layer(hidden, weight, find_region):
        with find_region("core_attn"):
            projected = hidden @ weight
            output = projected.sin() * projected
        held.append(projected)
        return output

    engine = make_engine(GraphDevice())
    Model(engine, layer=layer)
    tag = engine.finish_step().tags["core_attn"]
    assert tag.d2h_bytes == 0
    assert "something else holds its storage" in tag.kept_bytes


def test_a_host_budget_that_is_too_small_is_one_error():
    model = Model(make_engine(GraphDevice(), host_budget_bytes=512))
    with pytest.raises(StateError, match="and the host budget is used up"):
        model(make_inputs(1)[0])
