"""Tests unusual uses of an autograd graph: second-order gradients, partial backward, dropped graphs and user hooks."""

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, make_engine
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, OffloadEngine

pytestmark = pytest.mark.quick

NBYTES = 32 * 32 * 4
POLICIES = {
    "eager": TransferPolicy(window_bytes=0, prefetch_bytes=0),
    "large prefetch": TransferPolicy(window_bytes=0, prefetch_bytes=1 << 20),
    "large window": TransferPolicy(window_bytes=1 << 30, prefetch_bytes=2 * NBYTES),
}
ENGINES = pytest.mark.parametrize(
    "make_both",
    [
        pytest.param(lambda policy=policy, device=device: (None, make_engine(device(), policy=policy)), id=f"{name}-{place}")
        for (name, policy), (place, device) in zip(
            POLICIES.items(), (("delayed", DelayedCpuDevice), ("cpu", CpuDevice), ("delayed", DelayedCpuDevice)), strict=True
        )
    ],
)


class Net:
    """Four sites with a branch, a gathered save and weights."""

    def __init__(self) -> None:
        self.x, self.v, self.w = leaf(32, 32), leaf(32, 32, seed=1), leaf(32, 32, seed=2)
        self.leaves = (self.x, self.v, self.w)

    def __call__(self, engine: OffloadEngine | None) -> tuple[torch.Tensor, torch.Tensor]:
        sites = Sites(engine)
        with sites.watched():
            h = sites(lambda h: (h @ self.v).sin(), self.x * 2)
            k = sites(lambda h: h[:, ::4].exp().repeat(1, 4) * h, h)
            left = sites(lambda h: torch.tanh(h @ self.w), k)
            right = sites(lambda h, k: h * k.t(), h, k)
        return left, right


def check_drained(engine: OffloadEngine) -> None:
    assert engine.arena.used_bytes == 0
    engine.close()


def run_both(make_both, use) -> None:
    """Check that `use(net, engine)` is bitwise identical with and without an engine, and releases all host memory."""
    results = []
    no_engine, engine = make_both()
    with without_the_cyclic_collector():
        for one in (no_engine, engine):
            results.append([None if tensor is None else tensor.detach().clone() for tensor in use(Net(), one)])
        assert_same_bits(*results)
        assert engine.finish_step().d2h_bytes > 0
        check_drained(engine)


@ENGINES
def test_second_order_gradients_are_bitwise_identical(make_both):
    def use(net, engine):
        left, right = net(engine)
        first = torch.autograd.grad((left + right).sum(), net.leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        return [*first, *torch.autograd.grad(penalty, net.leaves)]

    run_both(make_both, use)


@ENGINES
def test_differentiating_a_gradient_computed_inside_a_region_is_bitwise_identical(make_both):
    def use(net, engine):
        def penalize(h: torch.Tensor) -> torch.Tensor:
            output = (h @ net.w).tanh()
            (gradient,) = torch.autograd.grad(output.sum(), h, create_graph=True)
            return output * gradient.square()

        sites = Sites(engine)
        loss = sites(torch.sin, sites(penalize, net.x * 2)).sum()
        return torch.autograd.grad(loss, [net.x, net.w])

    run_both(make_both, use)


@ENGINES
@pytest.mark.parametrize("moment", ["before", "after a backward", "after a partial backward"])
def test_dropping_a_graph_releases_all_host_memory(moment, make_both):
    _, engine = make_both()
    net = Net()
    with without_the_cyclic_collector():
        left, right = net(engine)
        assert engine.arena.used_bytes > 0
        if moment == "after a backward":
            torch.autograd.grad((left + right).sum(), net.x, retain_graph=True)
        if moment == "after a partial backward":
            torch.autograd.grad(left.sum(), net.w, retain_graph=True)
        del left, right
        check_drained(engine)


def test_dropping_a_chain_of_2000_regions_does_not_recurse():
    engine = make_engine(policy=POLICIES["eager"])
    with without_the_cyclic_collector():
        sites = Sites(engine)
        h = leaf(4, 4) * 1
        for _ in range(2000):
            h = sites(torch.sin, h)
        del h
        check_drained(engine)


def test_user_hooks_on_tensors_and_nodes_see_the_same_gradients():
    def use(engine):
        net, seen = Net(), []
        left, right = net(engine)
        for tensor in (left, right):
            tensor.register_hook(lambda gradient: seen.append(gradient.clone()))
            tensor.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
            tensor.retain_grad()
        (left * right).sum().backward()
        return [*seen, left.grad, right.grad, *(parameter.grad for parameter in net.leaves)]

    assert_same_bits(use(None), use(make_engine(DelayedCpuDevice())))


def test_user_saved_tensor_hooks_inside_a_region_take_precedence():
    def use(engine):
        packed = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.detach().clone())
            return tensor * 1

        def compute(h: torch.Tensor) -> torch.Tensor:
            h = h.sin()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                h = h.exp().tanh()
            return h.cos()

        x = leaf(32, 32)
        Sites(engine)(compute, x * 2).sum().backward()
        return [*packed, x.grad]

    engine = make_engine(DelayedCpuDevice())
    assert_same_bits(use(None), use(engine))
    assert engine.finish_step().tags["core_attn"].saved_tensors == 2  # by the sine and the cosine
