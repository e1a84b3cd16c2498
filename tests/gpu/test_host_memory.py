"""Tests pinned host memory on a real device: exact size as counted by the system, blocks of several parts, budgets, errors."""

from pathlib import Path

import pytest
import torch
from support.pinning import is_pinned

from fgoffload import HostMemory, StateError
from fgoffload.engine import AcceleratorDevice, Hazard
from fgoffload.engine.host_arena import HostArena
from fgoffload.units import GIB, MIB

SLACK_BYTES = 16 * MIB
"""Extra memory that the driver and Python may use: page tables, 8 bytes per 4 KiB, and small allocations."""


def read_resident_bytes() -> int:
    """Return the resident bytes of this process that are not backed by files, private and shared.

    Memory that the driver pins is resident and counts here. `VmLck` only counts memory locked by `mlock`.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    if not kib:
        pytest.skip("this kernel does not report RssAnon")
    return sum(kib) * 1024


@pytest.fixture
def device() -> AcceleratorDevice:
    device = AcceleratorDevice()
    device.allocate_host(MIB).close()  # CUDA's setup at the first pinning
    return device


def test_resident_memory_grows_by_the_reserved_bytes_without_rounding(device):
    arena = HostArena(device, budget=2 * GIB)
    before = read_resident_bytes()
    blocks = [arena.find_block(size_bytes) for size_bytes in (257 * MIB, 300 * MIB + 1, 513 * MIB)]
    reserved_bytes = arena.reserved_bytes
    assert reserved_bytes == 257 * MIB + 300 * MIB + 512 + 513 * MIB  # rounded up to powers of two it would be 2 GiB
    assert abs(read_resident_bytes() - before - reserved_bytes) < SLACK_BYTES
    assert all(is_pinned(block.parts[0]) for block in blocks)
    blocks.clear()
    arena.close()
    assert read_resident_bytes() - before < SLACK_BYTES


def test_changing_shapes_reuse_pinned_memory(device):
    arena = HostArena(device, budget=GIB)
    whole = arena.find_block(200 * MIB)
    del whole
    reserved_bytes, before = arena.reserved_bytes, read_resident_bytes()
    for size_bytes in range(MIB, 200 * MIB, 7 * MIB + 333):
        assert arena.find_block(size_bytes) is not None
    assert arena.reserved_bytes == reserved_bytes
    assert abs(read_resident_bytes() - before) < SLACK_BYTES
    arena.close()


def test_a_block_of_several_parts_is_reloaded_bitwise_identical(device):
    arena = HostArena(device, budget=GIB, slab_bytes=8 * MIB, min_part_bytes=MIB)
    blocks = [arena.find_block(4 * MIB) for _ in range(8)]
    del blocks[::2]
    block = arena.find_block(30 * MIB - 100)
    assert len(block.parts) > 3
    assert all(is_pinned(part) for part in block.parts)
    source = torch.randint(0, 256, (30 * MIB - 100,), device="cuda", dtype=torch.uint8)
    back = torch.zeros_like(source)
    written = device.record_event(device.current_stream())
    device.wait_event(device.d2h_stream, written, Hazard.SOURCE_UNWRITTEN)
    with device.copying_on(device.d2h_stream):
        for part, byte_range in block.pair(source):
            device.copy_bytes(destination=part, source=byte_range, stream=device.d2h_stream)
    device.wait_stream(device.h2d_stream, device.d2h_stream, Hazard.BLOCK_UNWRITTEN)
    with device.copying_on(device.h2d_stream):
        for part, byte_range in block.pair(back):
            device.copy_bytes(destination=byte_range, source=part, stream=device.h2d_stream)
    device.synchronize(device.record_event(device.h2d_stream))
    assert torch.equal(source, back)
    del block, part
    blocks.clear()
    arena.close()


def start_late_read(device):
    """Return an arena whose only block, filled with 7 and free again, is still being copied; the target, and the event."""
    arena = HostArena(device, budget=64 * MIB, slab_bytes=64 * MIB)
    block = arena.find_block(64 * MIB)
    block.parts[0].fill_(7)
    target = torch.empty(64 * MIB, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    with device.on(device.h2d_stream):
        torch.cuda._sleep(200_000_000)  # about 100 ms
        device.copy_bytes(destination=target, source=block.parts[0], stream=device.h2d_stream)
    block.place.last_read = device.record_event(device.h2d_stream)
    return arena, target, block.place.last_read


def test_a_block_with_a_pending_read_is_returned_with_its_event(device):
    arena, target, read = start_late_read(device)
    again = arena.find_block(64 * MIB)
    assert again.reads_to_wait_for == (read,)
    for event in again.reads_to_wait_for:
        device.synchronize(event)
    again.parts[0].fill_(9)
    assert bool((target == 7).all())
    del again
    assert arena.find_block(64 * MIB).reads_to_wait_for == ()
    arena.close()


def test_close_waits_for_pending_reads(device):
    arena, target, _ = start_late_read(device)
    arena.close()
    assert bool((target == 7).all())


def test_allocating_more_than_the_host_has_raises_a_state_error(device):
    with pytest.raises(StateError, match="--offload-host-budget"):
        device.allocate_host(1 << 55)
    torch.cuda.synchronize()  # the error does not reappear
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_pageable_memory_is_not_pinned():
    slab = AcceleratorDevice(host_memory=HostMemory.PAGEABLE).allocate_host(MIB)
    assert not is_pinned(slab.buffer)
    slab.close()
