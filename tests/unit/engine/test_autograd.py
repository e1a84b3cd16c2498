"""Whatever one may do with an autograd graph: twice, in part, in another order, differentiated again, looked at, or dropped."""

import sys

import pytest
import torch
from support.sites import Sites, check_same_bits, make_engine
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, DelayedCpuDevice, OffloadEngine

NBYTES = 32 * 32 * 4
POLICIES = {
    "eager": TransferPolicy(window_bytes=0, prefetch_bytes=0),
    "ahead": TransferPolicy(window_bytes=0, prefetch_bytes=1 << 20),
    "behind": TransferPolicy(window_bytes=1 << 30, prefetch_bytes=2 * NBYTES),
}
ENGINES = pytest.mark.parametrize(
    "make_both",
    [
        pytest.param(lambda policy=policy, device=device: (None, make_engine(device(), policy=policy)), id=f"{name}-{place}")
        for name, policy in POLICIES.items()
        for place, device in (("cpu", CpuDevice), ("delayed", DelayedCpuDevice))
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
    """Check that `use(net, engine)` returns the same bits without and with an engine, and that nothing is left on the host."""
    results = []
    without, engine = make_both()
    with without_the_cyclic_collector():
        for one in (without, engine):
            results.append([None if tensor is None else tensor.detach().clone() for tensor in use(Net(), one)])
        assert_same_bits(*results)
        assert engine.finish_step().d2h_bytes > 0
        check_drained(engine)


@ENGINES
def test_a_graph_that_is_kept_gives_the_same_bits_three_times(make_both):
    def use(net, engine):
        left, right = net(engine)
        loss = (left + right).sum()
        found = [torch.autograd.grad(loss, net.leaves, retain_graph=keep) for keep in (True, True, False)]
        return [gradient for gradients in found for gradient in gradients]

    run_both(make_both, use)


@ENGINES
@pytest.mark.parametrize("wanted", ["x", "v", "w", "xw"])
def test_gradients_of_some_leaves_only_are_the_same_and_the_rest_follows(wanted, make_both):
    def use(net, engine):
        left, right = net(engine)
        loss = (left + right).sum()
        part = torch.autograd.grad(loss, [getattr(net, name) for name in wanted], retain_graph=True)
        return [*part, *torch.autograd.grad(loss, net.leaves)]

    run_both(make_both, use)


@ENGINES
def test_the_gradient_of_an_activation_between_two_sites_is_the_same(make_both):
    def use(net, engine):
        sites = Sites(engine)
        h = sites(torch.sin, net.x * 2)
        k = sites(torch.exp, h)
        (between,) = torch.autograd.grad(k.sum(), h, retain_graph=True)  # backward stops in the middle of the lane
        return [between, *torch.autograd.grad(k.sum(), net.x)]

    run_both(make_both, use)


@ENGINES
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1)])
def test_two_losses_give_the_same_bits_in_any_order(order, make_both):
    def use(net, engine):
        losses = [output.sum() for output in net(engine)]
        found = []
        for position, index in enumerate(order):
            is_last = position == len(order) - 1
            found += torch.autograd.grad(losses[index], net.leaves, retain_graph=not is_last, allow_unused=True)
        return found

    run_both(make_both, use)


@ENGINES
def test_the_gradient_of_a_gradient_is_the_same(make_both):
    def use(net, engine):
        left, right = net(engine)
        first = torch.autograd.grad((left + right).sum(), net.leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        return [*first, *torch.autograd.grad(penalty, net.leaves)]

    run_both(make_both, use)


@ENGINES
def test_a_gradient_that_is_taken_inside_of_a_region_and_differentiated_again_is_the_same(make_both):
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
def test_saved_tensors_that_are_looked_at_outside_of_backward_are_those_that_were_saved(make_both):
    def use(net, engine):
        sites = Sites(engine)
        h = net.x * 2
        outputs = [sites(torch.sin, h)]
        for _ in range(3):
            outputs.append(sites(torch.sin, outputs[-1]))
        looked = [outputs[index].grad_fn._saved_self for index in (0, 3, 1, 3, 2)]  # in no order, one of them twice
        found = [*looked, *torch.autograd.grad(outputs[-1].sum(), net.x, retain_graph=True)]
        return [*found, outputs[2].grad_fn._saved_self, *torch.autograd.grad(outputs[-1].sum(), net.x)]

    run_both(make_both, use)


@ENGINES
@pytest.mark.parametrize("moment", ["before", "after a backward", "in the middle of one"])
def test_a_graph_that_is_dropped_gives_all_host_bytes_back(moment, make_both):
    _, engine = make_both()
    net = Net()
    with without_the_cyclic_collector():
        left, right = net(engine)
        assert engine.arena.used_bytes > 0
        if moment == "after a backward":
            torch.autograd.grad((left + right).sum(), net.x, retain_graph=True)
        if moment == "in the middle of one":
            torch.autograd.grad(left.sum(), net.w, retain_graph=True)
        del left, right
        check_drained(engine)


def test_a_part_of_a_graph_that_is_dropped_gives_its_part_back():
    engine = make_engine()
    with without_the_cyclic_collector():
        sites = Sites(engine)
        h = sites(torch.sin, leaf(32, 32) * 2)
        k = sites(torch.sin, h * 3)
        assert engine.arena.used_bytes == 2 * NBYTES
        del k
        assert engine.arena.used_bytes == NBYTES
        h.sum().backward()
        check_drained(engine)


def test_gradients_that_pile_up_over_microbatches_and_steps_are_the_same():
    x, w = leaf(32, 32), leaf(32, 32, seed=1)
    engine = make_engine(DelayedCpuDevice(), policy=POLICIES["ahead"])
    sums = []
    for one in (None, engine):
        w.grad = None
        for index in range(6):
            Sites(one, microbatch=index)(lambda h: (h @ w).sin() * h, x * (index + 1)).sum().backward()
        sums.append(w.grad.clone())
    assert_same_bits(sums[:1], sums[1:])
    check_drained(engine)


@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_two_hundred_nested_regions_give_the_same_bits(make_device):
    depth = 200
    x = leaf(32, 32)

    def nest(sites: Sites, h: torch.Tensor, left: int) -> torch.Tensor:
        if left == 0:
            return h
        return sites(lambda k: nest(sites, k.sin(), left - 1).cos(), h)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20 * depth))
    try:
        engine = make_engine(make_device(), policy=POLICIES["ahead"])
        check_same_bits(lambda sites: nest(sites, x * 2, depth), [x], engine)
    finally:
        sys.setrecursionlimit(limit)
    assert engine.finish_step().tags["core_attn"].groups == depth
    check_drained(engine)


def test_a_chain_of_two_thousand_regions_is_dropped_without_recursion():
    engine = make_engine(policy=POLICIES["eager"])
    with without_the_cyclic_collector():
        sites = Sites(engine)
        h = leaf(4, 4) * 1
        for _ in range(2000):
            h = sites(torch.sin, h)
        del h
        check_drained(engine)


def test_hooks_of_the_user_on_tensors_and_nodes_see_the_same_gradients():
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


def test_saved_tensor_hooks_of_the_user_inside_of_a_region_win_and_see_the_same_tensors():
    def use(engine):
        packed = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.detach().clone())
            return tensor * 1

        def function(h: torch.Tensor) -> torch.Tensor:
            h = h.sin()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                h = h.exp().tanh()
            return h.cos()

        x = leaf(32, 32)
        Sites(engine)(function, x * 2).sum().backward()
        return [*packed, x.grad]

    engine = make_engine(DelayedCpuDevice())
    assert_same_bits(use(None), use(engine))
    assert engine.finish_step().tags["core_attn"].saved_tensors == 2  # of the sine and the cosine
