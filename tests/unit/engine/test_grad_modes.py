"""Passes with and without gradients in any mixture, and steps that are never alike: counts, lengths, routing, precision."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from support.sites import Sites, check_same_bits, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, DelayedCpuDevice, OffloadEngine

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
HIDDEN = 32


def make_small_engine(make_device: Callable) -> OffloadEngine:
    return make_engine(make_device(), policy=TransferPolicy(window_bytes=4096, prefetch_bytes=8192))


class Experts(torch.nn.Module):
    """Tokens go where `routes` says; an expert may get all of them, or none."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.weights = torch.nn.ParameterList(torch.randn(HIDDEN, HIDDEN, generator=generator) / 6 for _ in range(count))

    def forward(self, sites: Sites, tokens: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(routes, stable=True)
        permuted = tokens[order]
        parts = permuted.split(torch.bincount(routes, minlength=len(self.weights)).tolist())

        def compute(permuted: torch.Tensor) -> torch.Tensor:
            outputs = []
            for part, weight in zip(parts, self.weights, strict=True):
                middle = part @ weight
                outputs.append(sites(lambda m: m.sigmoid() * m, middle, tag="moe_act") @ weight.t())
            return torch.cat(outputs)

        output = sites(compute, permuted, tag="expert_fc1").to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, order, output)


class Layers(torch.nn.Module):
    """Two layers with a norm, dropout in training only, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.dropout = torch.nn.Dropout(0.2)
        self.experts = Experts()

    def forward(self, sites: Sites, h: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with sites.watched():
                h = h + sites(lambda h: self.dropout(self.norm(h)), h, tag="mlp_norm")
                h = h + self.experts(sites, h, routes)
        return h


def make_layers() -> Layers:
    torch.manual_seed(0)
    return Layers()


def make_batch(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `[count, HIDDEN]` and their routes `[count]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def train_step(layers: Layers, engine: OffloadEngine | None, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Forward of all microbatches, backward of all, and an update in place."""
    losses = [layers(Sites(engine, microbatch=index), *batch).square().sum() for index, batch in enumerate(batches)]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    layers.zero_grad()


def evaluate(layers: Layers, engine: OffloadEngine | None, mode: Callable) -> torch.Tensor:
    """A forward as for a rollout, which changes neither the random state nor the engine."""
    state = torch.get_rng_state()
    layers.eval()
    with mode():
        output = layers(Sites(engine), *make_batch(24, seed=99))
    layers.train()
    torch.set_rng_state(state)
    return output


def run_both(make_device: Callable, use: Callable[[Layers, OffloadEngine | None], list[torch.Tensor]]) -> OffloadEngine:
    """Check that `use` returns the same bits and leaves the same weights without and with an engine."""
    results = []
    engine = make_small_engine(make_device)
    for one in (None, engine):
        layers = make_layers()
        torch.manual_seed(1)  # of the dropout
        results.append([*use(layers, one), *layers.state_dict().values()])
    assert_same_bits(*results)
    assert engine.arena.used_bytes == 0
    assert not has_hooks()
    return engine


@DEVICES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_grad_before_between_and_after_steps_touch_nothing(mode, make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            seen.append(evaluate(layers, engine, mode).clone())
            if engine:
                assert engine.finish_step().tags == {}
            train_step(layers, engine, [make_batch(16, seed=step)])
            if engine:
                assert engine.finish_step().d2h_bytes > 0
        return [*seen, evaluate(layers, engine, mode).clone()]

    run_both(make_device, use).close()


@DEVICES
def test_a_forward_with_grad_whose_output_is_thrown_away_gives_its_memory_back(make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        seen = []
        for step in range(2):
            seen.append(evaluate(layers, engine, contextlib.nullcontext).detach().clone())  # eval, and no no_grad
            if engine:
                assert engine.finish_step().d2h_bytes > 0
                assert engine.arena.used_bytes == 0
            train_step(layers, engine, [make_batch(16, seed=step)])
        return seen

    run_both(make_device, use).close()


@DEVICES
def test_a_forward_without_grad_in_the_middle_of_a_forward_or_a_region_saves_nothing(make_device):
    x = leaf(16, HIDDEN)

    def forward(sites: Sites) -> torch.Tensor:
        def function(h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = sites(lambda h: h.exp().sum(), h, tag="rollout")
            return h.sin() * scale

        return sites(function, x * 2)

    engine = check_same_bits(forward, [x], make_small_engine(make_device))
    assert set(engine.finish_step().tags) == {"core_attn"}


@DEVICES
def test_frozen_inputs_and_frozen_weights_give_the_same_bits(make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        seen = []
        for frozen in ([], ["norm.weight", "norm.bias"], ["experts.weights.0", "experts.weights.3"], ["norm.weight"]):
            for name, parameter in layers.named_parameters():
                parameter.requires_grad_(name not in frozen)
            tokens, routes = make_batch(16, seed=3)
            assert not tokens.requires_grad  # so the first mark of the lane is on no gradient
            output = layers(Sites(engine), tokens, routes)
            seen += torch.autograd.grad(output.sin().sum(), [p for p in layers.parameters() if p.requires_grad])
        return seen

    run_both(make_device, use).close()


def test_a_region_in_which_nothing_requires_a_gradient_saves_nothing():
    engine = make_engine()
    output = Sites(engine)(lambda h: h.sin().exp(), torch.ones(64, 64))
    assert not output.requires_grad
    stats = engine.finish_step().tags["core_attn"]
    assert (stats.groups, stats.saved_tensors, stats.d2h_bytes) == (1, 0, 0)
    engine.close()


@DEVICES
@pytest.mark.parametrize("counts", [(2, 4, 3), (1, 8, 1), (4, 2, 1)], ids=str)
def test_every_microbatch_of_every_step_leaves_however_many_there_are(counts, make_device):
    moved = []

    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for count in counts:
            train_step(layers, engine, [make_batch(16, seed=5) for _ in range(count)])
            if engine:
                moved.append(engine.finish_step().d2h_bytes)
        return []

    run_both(make_device, use).close()
    assert moved[0] > 0
    assert [size_bytes * counts[0] for size_bytes in moved] == [moved[0] * count for count in counts]


@DEVICES
def test_lengths_that_change_every_microbatch_give_the_same_bits(make_device):
    lengths = [16, 1, 200, 3, 77, 128, 2, 199, 64, 5, 31, 150]

    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for step in range(0, len(lengths), 3):
            train_step(layers, engine, [make_batch(length, seed=length) for length in lengths[step : step + 3]])
        return []

    engine = run_both(make_device, use)
    assert engine.finish_step().d2h_bytes > 0
    engine.close()


ROUTINGS = {
    "all tokens to the first": lambda count: torch.zeros(count, dtype=torch.int64),
    "all tokens to the last": lambda count: torch.full((count,), 3),
    "none to the first two": lambda count: torch.arange(count) % 2 + 2,
    "one to each": lambda count: torch.arange(count) % 4,
    "one token only": lambda count: torch.tensor([2] + [1] * (count - 1)),
}


@DEVICES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_gives_the_same_bits(routing, make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for step, name in enumerate((routing, "one to each", routing)):
            batches = [(make_batch(20, seed=seed)[0], ROUTINGS[name](20)) for seed in (step, step + 7)]
            train_step(layers, engine, batches)
        return []

    engine = run_both(make_device, use)
    stats = engine.finish_step()
    assert stats.tags["moe_act"].groups == 3 * 2 * 2 * 4  # steps, microbatches, layers, experts: those without tokens too
    assert stats.tags["moe_act"].d2h_bytes > 0
    engine.close()


@DEVICES
def test_a_batch_without_tokens_moves_nothing_and_gives_the_same_bits(make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for count in (16, 0, 16):
            train_step(layers, engine, [make_batch(count, seed=2)])
            if engine:
                assert (engine.finish_step().d2h_bytes > 0) == (count > 0)
        return []

    run_both(make_device, use).close()


@DEVICES
@pytest.mark.parametrize("is_around_backward", [False, True])
@pytest.mark.parametrize("caches_weights", [False, True])
def test_autocast_gives_the_same_bits(caches_weights, is_around_backward, make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        gradients = []
        for step in range(2):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches_weights))
                output = layers(Sites(engine), *make_batch(16, seed=step)).square().sum()
                if not is_around_backward:
                    stack.close()
                gradients += torch.autograd.grad(output, list(layers.parameters()))
        return gradients

    engine = run_both(make_device, use)
    assert engine.finish_step().tags["expert_fc1"].d2h_bytes > 0
    engine.close()


@DEVICES
def test_grad_mode_that_is_switched_inside_of_a_region_gives_the_same_bits(make_device):
    x = leaf(16, HIDDEN)

    def function(h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mask = h.sin() > 0
            with torch.enable_grad():
                k = h.exp()
        return k * mask

    check_same_bits(lambda sites: sites(function, x * 2), [x], make_small_engine(make_device)).close()


@DEVICES
def test_dropout_draws_the_same_numbers(make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        train_step(layers, engine, [make_batch(64, seed=1)])
        return [torch.rand(4)]  # the random state that is left

    run_both(make_device, use).close()
