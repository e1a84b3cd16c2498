"""Tests that offload frees exactly the offloaded bytes, and that dropping a graph frees everything."""

import gc

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, make_engine

from fgoffload import TransferPolicy
from fgoffload.engine import ActivationLedger, CpuDevice, HostSlab, KeptReason

pytestmark = pytest.mark.quick

NBYTES = 128 * 128 * 4


@pytest.fixture(autouse=True)
def _disable_gc():
    # Memory that only the garbage collector frees would cause out-of-memory errors on a GPU.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weight(seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) / 16)


def run_layers(sites: Sites, weights: list[torch.nn.Parameter], tags: list[str]) -> torch.Tensor:
    """Run layers that each save the input of a product and of a sine."""
    h = torch.ones(128, 128)
    for w, tag in zip(weights, tags, strict=True):
        h = sites(lambda h, w=w: (h @ w).sin(), h, tag=tag)
    return h


def get_resident_bytes(ledger: ActivationLedger) -> int:
    ledger.sample()
    return ledger.samples[-1].resident_bytes


def test_resident_bytes_after_forward_fall_by_exactly_the_bytes_that_the_tags_save():
    weights = [weight(seed) for seed in range(4)]
    resident = []
    for tags in (None, ["a", "b", "a", "b"]):
        engine = make_engine() if tags else None
        ledger = ActivationLedger(parameters=weights)
        with ledger.watch():
            if engine:
                with engine.observe(ledger):
                    output = run_layers(Sites(engine), weights, tags)
            else:
                output = run_layers(Sites(None), weights, ["a"] * 4)
        resident.append(get_resident_bytes(ledger))
        if engine:
            offloaded_bytes = engine.finish_step().d2h_bytes
            output.sum().backward()
            del output
            engine.close()
        else:
            del output
    # Four inputs and four products. The output of the last sine is not saved.
    assert resident[0] == 8 * NBYTES
    assert offloaded_bytes == 8 * NBYTES
    assert resident[1] == 0


def test_storages_below_the_minimum_size_stay_on_the_gpu_and_are_counted():
    w = weight()
    engine = make_engine(min_offloaded_numel=128 * 128 + 1)
    sites = Sites(engine)
    sites(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2).sum().backward()
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.TOO_SMALL.value: 2 * NBYTES}
    engine.close()


def test_tensors_marked_to_be_kept_and_parameters_are_never_offloaded():
    w = weight()
    engine = make_engine()
    kept = (torch.ones(128, 128) * 3).requires_grad_()
    h = kept * 2
    engine.keep([h])
    Sites(engine)(lambda h: h @ w.t(), h[:]).sum().backward()  # saves the marked storage and a view of the parameter
    stats = engine.finish_step().tags["core_attn"]
    assert stats.saved_tensors == 2
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.MARKED.value: NBYTES}
    engine.close()


def test_saving_an_empty_slice_does_not_keep_its_storage_alive():
    engine = make_engine()
    x = torch.ones(128, 128, requires_grad=True)
    ledger = ActivationLedger(parameters=[x])
    with engine.observe(ledger), ledger.watch():
        output = Sites(engine)(lambda h: torch.cat([h[:0].sin(), h.sin()]), x * 2)
    assert get_resident_bytes(ledger) == 0
    output.sum().backward()
    engine.close()


def test_the_window_bounds_the_bytes_in_flight_and_counts_the_waits():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=2 * NBYTES, prefetch_bytes=0))
    output = run_layers(Sites(engine), weights, ["a"] * 4)
    # Each group has two storages; the delayed device finishes no copy by itself.
    assert engine._transfers.in_flight_bytes == 2 * NBYTES
    assert engine.finish_step().window_waits == 3
    output.sum().backward()
    engine.close()


@pytest.mark.parametrize(("most", "waits"), [(None, 0), (0, 4), (1, 2)])
def test_the_number_of_groups_in_flight_is_limited_per_tag(most, waits):
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(prefetch_bytes=0))
    engine.execution.most_in_flight = most
    output = run_layers(Sites(engine), [weight(seed) for seed in range(4)], ["a", "b", "a", "b"])
    assert engine.finish_step().window_waits == waits
    output.sum().backward()
    engine.close()


def test_is_copying_out_is_true_until_the_copies_are_done():
    device = DelayedCpuDevice()
    engine = make_engine(device, policy=TransferPolicy(window_bytes=8 * NBYTES, prefetch_bytes=0))
    assert not engine.is_copying_out()
    output = run_layers(Sites(engine), [weight()], ["a"])
    assert engine.is_copying_out()
    device.synchronize(device.record_event(device.d2h_stream))
    assert not engine.is_copying_out()
    output.sum().backward()
    engine.close()


def test_closing_while_a_graph_still_needs_its_tensors_loses_nothing(caplog):
    w = weight()
    engine = make_engine()
    Sites(None)(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2).sum().backward()
    expected, w.grad = w.grad, None
    output = Sites(engine)(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2)
    engine.close()
    assert "still needs 128.00 KiB" in caplog.text
    assert engine.arena.reserved_bytes > 0
    output.sum().backward()
    assert torch.equal(w.grad, expected)
    del output
    engine.close()
    assert engine.arena.reserved_bytes == 0


def test_host_memory_is_freed_with_graph_and_engine_without_close():
    freed = []

    class Counting(CpuDevice):
        def allocate_host(self, size_bytes: int) -> HostSlab:
            return HostSlab(torch.empty(size_bytes, dtype=torch.uint8), free=lambda: freed.append(size_bytes))

    engine = make_engine(Counting(), host_budget_bytes=1 << 20)
    output = Sites(engine)(lambda h: h.sin(), torch.ones(128, 128, requires_grad=True) * 2)
    del engine
    assert freed == []
    output.sum().backward()
    del output
    assert freed == [1 << 20]


@pytest.mark.parametrize("has_end_marks", [True, False], ids=["marks", "no marks"])
def test_every_backward_of_a_retained_graph_prefetches_and_frees_device_memory(has_end_marks):
    weights = [weight(seed) for seed in range(6)]
    engine = make_engine(policy=TransferPolicy(prefetch_bytes=2 * NBYTES))
    output = run_layers(Sites(engine, has_end_marks=has_end_marks), weights, ["a"] * 6).sum()
    engine.finish_step()
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger):
        seen = []
        for _ in range(3):
            output.backward(retain_graph=True)
            seen.append((get_resident_bytes(ledger), engine.finish_step().prefetch_misses))
    assert seen == [(4 * NBYTES, 2)] * 3
    del output
    engine.close()


def test_bytes_are_reloaded_with_their_original_alignment():
    engine = make_engine()
    x = torch.randn(4096, requires_grad=True)
    h = x * 2
    output = Sites(engine)(lambda h: h[300:3000].sin(), h)  # 1200 bytes into the storage: 176 after a multiple of 512
    saved = output.grad_fn._saved_self
    assert (saved.data_ptr() - saved.untyped_storage().data_ptr()) % 512 == 1200 % 512
    assert torch.equal(saved, h[300:3000])
    del output, saved
    engine.close()


@pytest.mark.parametrize(("keeps_all", "place"), [(True, "layers.3.a mb=2"), (False, "backward of layers.3.a mb=2")])
def test_the_ledger_locates_the_peak_within_the_step(keeps_all, place):
    weights = [weight(seed) for seed in range(3)]
    engine = make_engine(min_offloaded_numel=(1 << 30) if keeps_all else 0, policy=TransferPolicy(prefetch_bytes=1 << 30))
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger), ledger.watch():
        output = run_layers(Sites(engine, microbatch=2), weights, ["a"] * 3).sum()
        output.backward()
    peak = ledger.find_peak()
    # The end of forward if all is kept; if all is offloaded, the start of backward, which reloads everything at once.
    assert (peak.resident_bytes, peak.place) == (ledger.peak_bytes, place)
    engine.close()
