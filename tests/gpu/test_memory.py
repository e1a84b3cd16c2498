"""Tests that allocator and ledger agree to the byte, that memory does not grow, and that everything is freed at the end."""

import gc
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from support.chain import make_weights, run_chain, take_gradients
from support.pieces import TwoOfOneAllocation

from fgoffload import Site, TransferPolicy
from fgoffload.engine import AcceleratorDevice, ActivationLedger, KeptReason, Lane, OffloadEngine

SIZE = 2048
NBYTES = SIZE * SIZE * 2
"""Size of one tensor: a multiple of the allocator's 2 MiB granularity, so that nothing is rounded up."""
LAYERS = 6


class Sample(NamedTuple):
    """Memory at one point of a step."""

    allocated: int
    requested: int
    resident: int


@pytest.fixture
def _without_the_cyclic_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_engine(**options) -> OffloadEngine:
    options.setdefault("policy", TransferPolicy(window_bytes=0, prefetch_bytes=2 * NBYTES))
    options.setdefault("host_budget_bytes", 512 << 20)
    return OffloadEngine(device=AcceleratorDevice(), **options)


def get_requested_bytes() -> int:
    """Return the bytes that live tensors requested, without the allocator's rounding."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def measure(engine: OffloadEngine | None, weights: list[torch.nn.Parameter]) -> tuple[list[Sample], int, ActivationLedger]:
    """Return the bytes after each layer's forward and at each layer's backward, the peak above the start, and the ledger."""
    take_gradients(weights)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # cached blocks of earlier tests may be larger than requested
    base = Sample(torch.cuda.memory_allocated(), get_requested_bytes(), 0)
    torch.cuda.reset_peak_memory_stats()
    ledger = ActivationLedger(parameters=weights)
    samples = []

    def look() -> None:
        ledger.sample()
        resident = ledger.samples[-1].resident_bytes
        samples.append(Sample(torch.cuda.memory_allocated() - base.allocated, get_requested_bytes() - base.requested, resident))

    with ledger.watch():
        if engine:
            with engine.observe(ledger):
                run_chain(engine, weights, look=look)
        else:
            run_chain(None, weights, look=look)
    return samples, torch.cuda.max_memory_allocated() - base.allocated, ledger


def test_allocated_memory_changes_by_the_bytes_of_the_ledger_throughout_a_step():
    weights = make_weights("cuda", LAYERS, size=SIZE)
    engine = make_engine()
    measure(None, weights)  # cuBLAS allocates its workspaces
    without, _, _ = measure(None, weights)
    with_engine, _, _ = measure(engine, weights)
    assert len(without) == len(with_engine) == 2 * LAYERS
    for one, other in zip(without, with_engine, strict=True):
        assert one.requested - other.requested == one.resident - other.resident
        assert abs((one.allocated - other.allocated) - (one.resident - other.resident)) <= 0.01 * one.allocated
    # At the end of forward, 12 saved tensors are resident without offload, and none with it.
    assert without[LAYERS - 1].resident == 2 * LAYERS * NBYTES
    assert with_engine[LAYERS - 1].resident == 0
    engine.close()


def test_offload_lowers_the_peak_and_the_ledger_locates_it():
    weights = make_weights("cuda", LAYERS, size=SIZE)
    engine = make_engine()
    measure(None, weights)
    _, peak_without, ledger_without = measure(None, weights)
    _, peak_with, ledger_with = measure(engine, weights)
    # Each layer saves input, weight and product; the first saves no weight, since its input needs no gradient.
    saves = 3 * LAYERS - 1
    peak, peak_now = ledger_without.find_peak(), ledger_with.find_peak()
    assert peak[:2] == (saves, 2 * LAYERS * NBYTES)  # the end of forward, before backward unpacks anything
    assert peak_now[:2] == (saves, 4 * NBYTES)  # the start of backward: one group, and the next one, reloaded ahead
    assert peak_now.place == f"backward of layers.{LAYERS}.core_attn mb=0"
    # The peak drops as much as the ledger's peak, except for gradients of weights, which backward allocates meanwhile.
    saved_bytes = ledger_without.peak_bytes - ledger_with.peak_bytes
    assert peak_without - peak_with >= saved_bytes - LAYERS * NBYTES
    assert peak_with < peak_without
    engine.close()


@pytest.mark.parametrize("rows", [(SIZE,), (256, 1024, 512, 2048, 768)], ids=["one shape", "changing shapes"])
def test_reserved_memory_does_not_grow_over_a_hundred_steps(rows):
    weights = make_weights("cuda", LAYERS, size=SIZE)
    engine = make_engine()  # without a window, allocations have the same order in every step
    reserved = []
    for step in range(140):
        run_chain(engine, weights, rows=rows[step % len(rows)])
        take_gradients(weights)
        engine.finish_step()
        reserved.append((torch.cuda.memory_reserved(), engine.arena.reserved_bytes))
    for on_device_or_host in zip(*reserved, strict=True):
        assert max(on_device_or_host[40:]) == max(on_device_or_host[:40])
    engine.close()


def test_close_frees_all_memory():
    weights = make_weights("cuda", LAYERS, size=SIZE)
    run_chain(None, weights)
    take_gradients(weights)
    torch.cuda.synchronize()
    before = get_requested_bytes()
    engine = make_engine()
    for _ in range(3):
        run_chain(engine, weights)
        take_gradients(weights)
    assert engine.arena.reserved_bytes > 0
    engine.close()
    assert get_requested_bytes() == before
    assert engine.arena.reserved_bytes == 0


KINDS = {
    "offloaded": ({}, None),
    "below the minimum size": ({"min_offloaded_numel": SIZE * SIZE + 1}, KeptReason.TOO_SMALL),
    "beyond the host budget": ({"host_budget_bytes": 3 * NBYTES}, KeptReason.HOST_BUDGET),
    "excluded from offload": ({}, KeptReason.MARKED),
}


@pytest.mark.usefixtures("_without_the_cyclic_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_allocated_memory_is_constant_without_the_cyclic_collector(kind):
    options, reason = KINDS[kind]
    weights = make_weights("cuda", 3, size=SIZE)
    engine = make_engine(**options)
    allocated = set()
    for step in range(110):
        run_chain(engine, weights, keep=reason is KeptReason.MARKED)
        take_gradients(weights)
        torch.cuda.synchronize()
        stats = engine.finish_step()
        if step >= 10:
            allocated.add((torch.cuda.memory_allocated(), get_requested_bytes()))
    kept = stats.tags["core_attn"].kept_bytes
    assert set(kept) == ({reason.value} if reason else set())
    assert len(allocated) == 1
    engine.close()


class Piece:
    """A part of a tensor's memory, from which torch creates a storage that keeps the tensor alive."""

    def __init__(self, whole: torch.Tensor, start: int, size: int) -> None:
        self._whole = whole
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "<f4",
            "data": (whole.data_ptr() + 4 * start, False),
            "strides": None,
            "version": 3,
        }


def make_pieces(size):
    memory = torch.empty(size + 64, device="cuda")
    return tuple(torch.as_tensor(Piece(memory, start, count), device="cuda") for start, count in ((0, size), (size, 64)))


def test_offloading_the_large_part_of_an_allocation_frees_all_of_it():
    # The small piece would otherwise keep the whole allocation alive.
    engine = make_engine(min_offloaded_bytes=1 << 20)
    lane = Lane(chunk=0, microbatch=0)
    x = torch.randn(4 << 20, device="cuda", requires_grad=True)
    h = x * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    region = engine.find_region(Site(chunk=0, layer=0, tag="core_attn"), lane)
    with region.saving():
        output = TwoOfOneAllocation.apply(h, make_pieces)
    region.end()
    assert torch.cuda.memory_allocated() - before == output.nbytes
    output.sum().backward()
    assert torch.equal(x.grad, 2 * (3 + h.detach()))
    assert engine.finish_step().d2h_bytes == h.nbytes + 256
    engine.close()
