"""Tests prefetch while backward is still running layers without offload."""

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, check_same_bits, make_engine

from fgoffload import TransferPolicy
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.stats import TagStats

pytestmark = pytest.mark.quick

NBYTES = 128 * 128 * 4


def forward_with_kept_layers(sites: Sites, w: torch.Tensor, *, layers: int) -> torch.Tensor:
    """Run two offloaded sites, then `layers` ops that are only watched."""
    h = w * 2
    for _ in range(2):
        h = sites(torch.sin, h)
    for _ in range(layers):
        with sites.watched():
            h = h.sin()
    return h


def run(*, layers: int, prefetch_bytes: int) -> tuple[int, int]:
    """Return the prefetch misses of a step, and by how much memory during backward exceeds that at its start."""
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=prefetch_bytes))
    w, ledger = torch.ones(128, 128, requires_grad=True), ActivationLedger(parameters=())
    with engine.observe(ledger), ledger.watch():
        output = forward_with_kept_layers(Sites(engine), w, layers=layers)
        begin = len(ledger.samples)
        begin_bytes = ledger.samples[-1].resident_bytes
        output.backward(torch.ones_like(output))
    peak_bytes = max(sample.resident_bytes for sample in ledger.samples[begin:])
    misses = engine.finish_step().prefetch_misses
    engine.close()
    return misses, peak_bytes - begin_bytes


@pytest.mark.parametrize(
    ("layers", "prefetch_bytes", "misses"),
    # With one layer, backward has released nothing yet. A group larger than the prefetch limit is reloaded alone.
    [(0, 2 * NBYTES, 1), (1, 2 * NBYTES, 1), (2, 2 * NBYTES, 0), (4, NBYTES // 2, 0), (4, 0, 2)],
)
def test_groups_are_reloaded_while_backward_is_in_kept_layers(layers, prefetch_bytes, misses):
    assert run(layers=layers, prefetch_bytes=prefetch_bytes)[0] == misses
    assert run_followed(layers=layers, prefetch_bytes=prefetch_bytes) == misses


def test_backward_never_exceeds_the_memory_in_use_at_the_end_of_forward():
    # The current gradient is not an activation, and each reload reuses memory that backward has released.
    assert run(layers=6, prefetch_bytes=2 * NBYTES)[1] <= 0


def run_loss_window(*, window_bytes: int) -> TagStats:
    """Return the statistics of three sites: at the end of forward, the first is offloaded and two copies are in flight."""
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=1 << 20))
    sites, w = Sites(engine), torch.ones(128, 128, requires_grad=True)
    h = sites(torch.sin, w * 2)
    engine.device.synchronize(engine.device.record_event(engine.device.d2h_stream))
    h = sites(torch.sin, sites(torch.sin, h))
    engine.expect_backward(sites.lane, window_bytes=window_bytes)
    assert engine._transfers.in_flight_bytes <= window_bytes
    engine.device.synchronize(engine.device.record_event(engine.device.d2h_stream))  # the loss takes longer than the copies
    h.backward(torch.ones_like(h))
    stats = engine.finish_step().tags["core_attn"]
    engine.close()
    return stats


@pytest.mark.parametrize(("window_bytes", "kept"), [(2 * NBYTES, 2), (NBYTES, 1), (NBYTES - 1, 0), (0, 0)])
def test_groups_beyond_the_loss_window_are_offloaded_before_the_loss_and_reloaded(window_bytes, kept):
    stats = run_loss_window(window_bytes=window_bytes)
    assert (stats.recalled_bytes, stats.h2d_bytes) == (kept * NBYTES, (3 - kept) * NBYTES)
    # Prefetch starts when backward reaches the last group, so backward waits only if that group was offloaded too.
    assert stats.prefetch_misses == (kept == 0)


def test_groups_still_held_back_when_backward_is_due_stay_on_the_gpu():
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=2 * NBYTES))
    sites, w = Sites(engine), torch.ones(128, 128, requires_grad=True)
    h = w * 2
    for _ in range(6):
        h = sites(torch.sin, h, is_held=True)
    engine.expect_backward(sites.lane)
    engine.flush()
    h.backward(torch.ones_like(h))
    stats = engine.finish_step()
    assert stats.d2h_bytes == stats.prefetch_misses == 0
    assert stats.tags["core_attn"].recalled_bytes == 6 * NBYTES
    engine.close()


def run_followed(*, layers: int, prefetch_bytes: int) -> int:
    """Return the prefetch misses of a step with two offloaded sites, then `layers` ops that are only followed."""
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=prefetch_bytes))
    w = torch.ones(128, 128, requires_grad=True)

    def forward(sites: Sites) -> torch.Tensor:
        h = w * 2
        for _ in range(2):
            h = sites(torch.sin, h)
        for _ in range(layers):
            with sites.followed():
                h = h.sin()
        return h

    check_same_bits(forward, [w], engine)
    misses = engine.finish_step().prefetch_misses
    engine.close()
    return misses
