"""Tests passes with and without gradients, and steps with frozen weights, changing routing and lengths, and autocast."""

from collections.abc import Callable

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, has_hooks, make_engine
from support.tensors import assert_same_bits

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, OffloadEngine

pytestmark = pytest.mark.quick

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
HIDDEN = 32


def make_small_engine(make_device: Callable) -> OffloadEngine:
    return make_engine(make_device(), policy=TransferPolicy(window_bytes=4096, prefetch_bytes=8192))


class Experts(torch.nn.Module):
    """Routes tokens to experts by `routes`; an expert may get all tokens or none."""

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
    """Run forward of all microbatches, then backward of all, and update the weights in place."""
    losses = [layers(Sites(engine, microbatch=index), *batch).square().sum() for index, batch in enumerate(batches)]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    layers.zero_grad()


def evaluate(layers: Layers, engine: OffloadEngine | None, mode: Callable) -> torch.Tensor:
    """Run a forward as in a rollout, without changing the random state."""
    state = torch.get_rng_state()
    layers.eval()
    with mode():
        output = layers(Sites(engine), *make_batch(24, seed=99))
    layers.train()
    torch.set_rng_state(state)
    return output


def run_both(make_device: Callable, use: Callable[[Layers, OffloadEngine | None], list[torch.Tensor]]) -> OffloadEngine:
    """Check that the results of `use` and the weights after it are bitwise identical with and without an engine."""
    results = []
    engine = make_small_engine(make_device)
    for one in (None, engine):
        layers = make_layers()
        torch.manual_seed(1)  # for dropout
        results.append([*use(layers, one), *layers.state_dict().values()])
    assert_same_bits(*results)
    assert engine.arena.used_bytes == 0
    assert not has_hooks()
    return engine


@DEVICES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_grad_around_steps_change_nothing(mode, make_device):
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
def test_frozen_inputs_and_frozen_weights_are_bitwise_identical(make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        seen = []
        for frozen in ([], ["norm.weight", "norm.bias"], ["experts.weights.0", "experts.weights.3"], ["norm.weight"]):
            for name, parameter in layers.named_parameters():
                parameter.requires_grad_(name not in frozen)
            tokens, routes = make_batch(16, seed=3)
            assert not tokens.requires_grad  # so the lane has no gradient for its first mark
            output = layers(Sites(engine), tokens, routes)
            seen += torch.autograd.grad(output.sin().sum(), [p for p in layers.parameters() if p.requires_grad])
        return seen

    run_both(make_device, use).close()


ROUTINGS = {
    "all to the first": lambda count: torch.zeros(count, dtype=torch.int64),
    "none to the first two": lambda count: torch.arange(count) % 2 + 2,
    "one to each": lambda count: torch.arange(count) % 4,
}


@DEVICES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_and_changing_lengths_are_bitwise_identical(routing, make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for lengths in ((16, 1), (200, 3), (0, 20)):
            train_step(layers, engine, [(make_batch(length, seed=length)[0], ROUTINGS[routing](length)) for length in lengths])
        return []

    engine = run_both(make_device, use)
    stats = engine.finish_step()
    assert stats.tags["moe_act"].groups == 3 * 2 * 2 * 4  # steps, microbatches, layers, experts (even without tokens)
    assert stats.tags["moe_act"].d2h_bytes > 0
    engine.close()


@DEVICES
@pytest.mark.parametrize("cache_enabled", [False, True])
def test_autocast_is_bitwise_identical(cache_enabled, make_device):
    def use(layers: Layers, engine: OffloadEngine | None) -> list[torch.Tensor]:
        gradients = []
        for step in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
                output = layers(Sites(engine), *make_batch(16, seed=step)).square().sum()
            gradients += torch.autograd.grad(output, list(layers.parameters()))
        return gradients

    engine = run_both(make_device, use)
    assert engine.finish_step().tags["expert_fc1"].d2h_bytes > 0
    engine.close()
