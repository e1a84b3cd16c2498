"""Tests storages that groups or microbatches share, or that the user references."""

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, check_same_bits, make_engine
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector
from torch.multiprocessing.reductions import StorageWeakRef

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, KeptReason, OffloadEngine

pytestmark = pytest.mark.quick

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
NBYTES = 64 * 64 * 4


def make_eager_engine(make_device) -> OffloadEngine:
    return make_engine(make_device(), policy=TransferPolicy(window_bytes=0, prefetch_bytes=2 * NBYTES))


@DEVICES
@pytest.mark.parametrize("is_held", [False, True])
def test_a_storage_saved_by_many_groups_is_offloaded_and_reloaded_once(is_held, make_device):
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        parts = [
            sites(lambda h, n=n: h[n : n + 40].sin().sum(0) + h.t()[n].cos(), h, tag=f"part_{n}", is_held=is_held)
            for n in range(4)
        ]
        if sites.engine and is_held:
            sites.engine.flush()
        return torch.stack(parts)

    engine = make_eager_engine(make_device)
    check_same_bits(forward, [x], engine)
    stats = engine.finish_step()
    if is_held:  # all views are known before the offload: rows 0 to 43, and a column of full height
        assert stats.d2h_bytes == NBYTES - (64 - 4) * 4
    # Bytes outside the views saved so far are not copied; a later view of them is offloaded separately.
    assert stats.d2h_bytes <= 4 * NBYTES
    engine.close()


def run_microbatches(engine: OffloadEngine | None, table: torch.Tensor, order: str) -> list[torch.Tensor]:
    """Run microbatches that each save a shared table and a tensor of their own; `order` as in `f0 f1 b0 b1`."""
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    gradients = []
    for step in order.split():
        if step[0] == "f":
            x = leaf(64, 64, seed=int(step[1:]))
            output = Sites(engine, microbatch=int(step[1:]))(lambda h: (h * table).sin(), x * 2)
            outputs[step[1:]] = (output, x)
        else:
            output, x = outputs.pop(step[1:])
            gradients += torch.autograd.grad(output.sum(), x)
    return gradients


@DEVICES
@pytest.mark.parametrize(
    "order", ["f0 b0 f1 b1 f2 b2 f3 b3", "f0 f1 f2 f3 b0 b1 b2 b3", "f0 f1 f2 f3 b3 b2 b1 b0", "f0 f1 b0 f2 b1 f3 b2 b3"]
)
def test_a_table_shared_by_all_microbatches_is_offloaded_at_most_once(order, make_device):
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))  # like rotary embeddings
    engine = make_eager_engine(make_device)
    table_bytes = 0
    for _ in range(3):
        assert_same_bits(run_microbatches(None, table, order), run_microbatches(engine, table, order))
        table_bytes += engine.finish_step().d2h_bytes - 4 * NBYTES
    assert table_bytes <= NBYTES
    assert engine.arena.used_bytes == 0
    engine.close()


@DEVICES
def test_tensors_are_freed_unless_the_user_references_them(make_device):
    x = leaf(64, 64)
    engine = make_eager_engine(make_device)
    with without_the_cyclic_collector():
        referenced, dropped = x * 2, x * 3
        storages = [StorageWeakRef(referenced.untyped_storage()), StorageWeakRef(dropped.untyped_storage())]
        before = referenced.detach().clone()
        output = Sites(engine)(lambda h, k: h.sin() + k.sin(), referenced, dropped)
        del dropped
        assert [storage.expired() for storage in storages] == [False, True]
        assert_same_bits([before], [referenced])
        output.sum().backward()
        stats = engine.finish_step().tags["core_attn"]
        assert (stats.d2h_bytes, stats.held_elsewhere_bytes) == (2 * NBYTES, NBYTES)
        del referenced, output
        assert storages[0].expired()
    engine.close()


def test_a_table_whose_offload_is_always_cancelled_is_offloaded_once():
    device = DelayedCpuDevice()
    engine = make_engine(device, policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=1 << 20))
    table, x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)), leaf(64, 64)
    offloaded = []
    for _ in range(4):
        Sites(engine)(lambda h: h * table, x * 2).sum().backward()  # before the copy is done
        device.synchronize(device.record_event(device.d2h_stream))
        stats = engine.finish_step()
        offloaded.append((stats.d2h_bytes // NBYTES, stats.h2d_bytes))
    assert offloaded == [(1, 0), (0, 0), (0, 0), (0, 0)]
    assert stats.tags["core_attn"].kept_bytes == {KeptReason.REFERENCED.value: NBYTES}
    engine.close()


def test_a_storage_offloaded_again_after_a_cancel_waits_for_its_second_copy():
    device = DelayedCpuDevice()
    engine = make_engine(device, policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=1 << 20))
    x, other = leaf(64, 64), leaf(64, 64)
    h = x * 2
    first = Sites(engine)(torch.sin, h)
    first_copy = device.record_event(device.d2h_stream)
    torch.autograd.grad(first.sum(), h, retain_graph=True)  # before the copy is done, so that the offload is cancelled
    between = Sites(engine, microbatch=1)(torch.sin, other * 2)  # reuses the block that the cancelled copy has written
    second = Sites(engine, microbatch=2)(torch.cos, h)
    del h
    device.synchronize(first_copy)
    engine.poll()
    second.sum().backward()
    assert torch.equal(x.grad, 2 * -torch.sin(x.detach() * 2))
    del first, between, second
    engine.close()


def test_a_storage_that_the_user_keeps_stays_on_the_gpu_in_all_its_groups():
    engine = make_engine()
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        if sites.engine:
            sites.engine.keep([h[3:]])  # any view marks its storage
        return sites(torch.sin, h, tag="a") + sites(lambda h: h[:10].cos().sum(), h, tag="b")

    check_same_bits(forward, [x], engine)
    tags = engine.finish_step().tags
    assert [tags[tag].d2h_bytes for tag in "ab"] == [0, 0]
    assert tags["a"].kept_bytes == {KeptReason.MARKED.value: NBYTES}
    assert tags["b"].kept_bytes == {KeptReason.MARKED.value: 10 * 64 * 4}


def test_chunks_with_their_own_version_counters_are_not_treated_as_views():
    sites = Sites(make_engine(host_budget_bytes=0))  # all tensors are kept, and checked in backward
    leaf = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    h = leaf * 1
    _kept = sites(torch.sin, h[:2])  # keeps its saved tensor alive
    output = sites(torch.cos, torch.unsafe_chunk(h, 2)[0])
    h.relu_()  # no backward uses the first view; the chunk has its own version counter, so torch uses the new values
    output.sum().backward()
    assert torch.equal(leaf.grad[:2], -h[:2].sin().detach())
