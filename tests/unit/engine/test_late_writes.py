"""Tests late writes: into a tensor after its save, and into a host block that is in use again."""

from collections.abc import Callable

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import StateError, TransferPolicy
from fgoffload.engine import CpuDevice, OffloadEngine

pytestmark = pytest.mark.quick

NBYTES = 64 * 64 * 4
LARGE_WINDOW = TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0)

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda h: h.add_(1),
    "an element of a view": lambda h: h.t()[3].__setitem__(5, 0.0),
    "out=": lambda h: torch.sin(torch.ones(64, 64), out=h),
    "copy_ to a slice": lambda h: h[60:].copy_(torch.ones(4, 64)),
    "a detached alias": lambda h: h.detach().zero_(),
    "relu_": torch.relu_,
    "a foreach op": lambda h: torch._foreach_mul_([h], 2),
    "storage resized to 0": lambda h: h.untyped_storage().resize_(0),
    "storage resized to twice its size": lambda h: h.untyped_storage().resize_(2 * NBYTES),
}


def save(engine: OffloadEngine, h: torch.Tensor, *, is_held: bool, microbatch: int = 7) -> torch.Tensor:
    sites = Sites(engine, microbatch=microbatch)
    _ = sites(torch.sin, leaf(4, 4) * 2)  # so that the tested site is not the first
    return sites(torch.cos, h, tag="attn_norm", is_held=is_held)


@pytest.mark.parametrize("moment", ["before its copy is queued", "while its copy is queued", "too small", "kept"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_the_save_raises_with_tag_layer_and_microbatch(write, moment):
    kept_options = {"too small": {"min_offloaded_numel": 1 << 20}, "kept": {"keep": torch.is_tensor}}
    engine = make_engine(DelayedCpuDevice(), policy=LARGE_WINDOW, **kept_options.get(moment, {}))
    h = leaf(64, 64) * 2
    output = save(engine, h, is_held=moment.startswith("before")).sum()
    with torch.no_grad():
        WRITES[write](h)
    engine.flush()  # no error yet, since backward may not use the tensor
    refused = r"\[64, 64\] that layers\.2\.attn_norm mb=7 saved for backward was (changed|resized)"
    with pytest.raises(StateError, match=refused):
        output.backward()


@pytest.mark.parametrize("write", [name for name in WRITES if "storage" not in name])
def test_a_write_after_the_offload_does_not_affect_backward(write):
    # Torch refuses this, since backward would use the new bytes; here the saved bytes are already on the host.
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=0))
    h = leaf(64, 64) * 2
    expected = -h.detach().sin()
    output = save(engine, h, is_held=False)
    with torch.no_grad():
        WRITES[write](h)
    (gradient,) = torch.autograd.grad(output.sum(), h)
    assert_same_bits([expected], [gradient])


def make_tight_engine(policy: TransferPolicy) -> OffloadEngine:
    """Return an engine with one host block of `NBYTES`, so that the next save reuses it."""
    return make_engine(DelayedCpuDevice(), policy=policy, host_budget_bytes=NBYTES)


def test_a_queued_copy_of_a_dropped_graph_does_not_overwrite_the_next_one():
    engine = make_tight_engine(LARGE_WINDOW)
    dropped = Sites(engine)(torch.sin, leaf(64, 64, seed=1) * 2)
    del dropped  # its copy to the host has not run
    x = leaf(64, 64)
    output = Sites(engine)(torch.sin, x * 2)
    assert engine.finish_step().d2h_bytes == 2 * NBYTES
    engine.close()  # runs both copies, and releases the source
    output.sum().backward()
    assert engine.finish_step().h2d_bytes == NBYTES
    assert_same_bits([2 * (x * 2).cos()], [x.grad])


def test_a_cancelled_copy_that_is_still_queued_does_not_overwrite_the_next_one():
    engine = make_tight_engine(LARGE_WINDOW)
    first, second = leaf(64, 64, seed=1), leaf(64, 64, seed=2)
    sites = Sites(engine)
    cancelled = sites(torch.sin, first * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[0])  # releases the block before its copy has run
    output = Sites(engine)(torch.sin, second * 2)
    assert engine.finish_step().d2h_bytes == 2 * NBYTES
    engine.close()
    (cancelled.sum() + output.sum()).backward()
    assert engine.finish_step().h2d_bytes == NBYTES
    assert_same_bits([2 * (first * 2).cos(), 2 * (second * 2).cos()], [first.grad, second.grad])


@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_a_host_block_reused_many_times_never_returns_bytes_of_another_tensor(make_device):
    engine = make_engine(
        make_device(), host_budget_bytes=2 * NBYTES, policy=TransferPolicy(window_bytes=NBYTES, prefetch_bytes=NBYTES)
    )
    offloaded_bytes = 0
    for step in range(20):
        leaves = [leaf(64, 64, seed=3 * step + index) for index in range(3)]
        outputs = [Sites(engine, microbatch=index)(torch.sin, x * 2) for index, x in enumerate(leaves)]
        for index in ((0, 1, 2), (2, 1, 0), (1, 2, 0))[step % 3]:
            outputs[index].sum().backward()
            outputs[index] = None
        assert_same_bits([2 * (x * 2).cos() for x in leaves], [x.grad for x in leaves])
        offloaded_bytes += engine.finish_step().d2h_bytes
    assert offloaded_bytes == 20 * 2 * NBYTES  # two of three fit, in each step
    assert engine.arena.used_bytes == 0
    engine.close()
