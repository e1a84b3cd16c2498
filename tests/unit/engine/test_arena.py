"""Tests the arena: exact sizes, no block handed out twice, and free ranges merged."""

import contextlib
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fgoffload import InternalError
from fgoffload.engine import CpuDevice, HostSlab
from fgoffload.engine.host_arena import MIN_PART_BYTES, HostArena
from fgoffload.engine.host_block import HostBlock

pytestmark = pytest.mark.quick


def make_arena(budget_bytes: int = 1 << 20, slab_bytes: int = 1 << 16, device: CpuDevice | None = None) -> HostArena:
    return HostArena(device or CpuDevice(), budget=budget_bytes, slab_bytes=slab_bytes)


def test_a_block_has_the_requested_size_and_its_slab_is_rounded_only_to_512_bytes():
    arena = make_arena()
    block = arena.find_block(100_000)
    assert block.parts[0].shape == (100_000,)
    assert arena.reserved_bytes == 100_352  # the next multiple of 512
    assert arena.used_bytes == 100_352


def test_the_whole_budget_can_be_used_and_is_never_exceeded():
    arena = make_arena(budget_bytes=10 * 512, slab_bytes=4 * 512)
    blocks = [arena.find_block(512) for _ in range(11)]
    assert [block is not None for block in blocks] == [True] * 10 + [False]
    assert arena.reserved_bytes == 10 * 512
    assert arena.find_block(0) is None
    blocks.clear()
    assert arena.used_bytes == 0
    assert arena.find_block(512) is not None


def test_closing_with_a_block_in_use_raises_an_internal_error():
    arena = make_arena()
    block = arena.find_block(512)
    with pytest.raises(InternalError, match="closed with 512 bytes in use"):
        arena.close()
    del block
    arena.close()
    assert arena.reserved_bytes == 0


class Read:
    """The event recorded after a copy to the device."""

    def __init__(self) -> None:
        self.is_done = False


class ModelDevice(CpuDevice):
    """Exposes its slabs, and completes events only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs: list[torch.Tensor] = []

    def is_done(self, event) -> bool:
        return event.is_done

    def synchronize(self, event) -> None:
        event.is_done = True

    def allocate_host(self, size_bytes: int) -> HostSlab:
        slab = super().allocate_host(size_bytes)
        self.slabs.append(slab.buffer)
        return slab


class ArenaMachine(RuleBasedStateMachine):
    """Compares the arena with a model: the owner and the pending reads of each 512-byte unit of each slab."""

    min_part_bytes = MIN_PART_BYTES
    """Larger than any block here, so that no block is split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[int, HostBlock]] = []
        self.reads: list[Read] = []
        self.owners: list[list[int | None]] = []
        self.readers: list[list[set[Read]]] = []
        self.count = self.peak_bytes = 0

    @initialize(budget_units=st.integers(1, 100), slab_units=st.integers(1, 20))
    def begin(self, budget_units, slab_units):
        self.device = ModelDevice()
        self.budget_bytes = budget_units * 512
        self.arena = HostArena(
            self.device,
            budget=self.budget_bytes + 100,  # the last 100 bytes do not fill a unit
            slab_bytes=slab_units * 512,
            min_part_bytes=self.min_part_bytes,
        )

    def list_units(self, block: HostBlock) -> list[tuple[int, int]]:
        units = []
        for part in block.parts:
            slab = next(
                number
                for number, slab in enumerate(self.device.slabs)
                if part.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
            )
            assert part.storage_offset() % 512 == 0
            assert part.storage_offset() + part.numel() <= self.device.slabs[slab].numel()
            first = part.storage_offset() // 512
            units += [(slab, unit) for unit in range(first, first + max(1, -(-part.numel() // 512)))]
        return units

    def get_longest_free_bytes(self) -> int:
        runs = [len(run) for owners in self.owners for run in "".join(" x"[o is not None] for o in owners).split("x")]
        return 512 * max(runs, default=0)

    def may_refuse(self, needed_bytes: int) -> bool:
        if self.min_part_bytes == MIN_PART_BYTES:
            return needed_bytes > max(self.get_longest_free_bytes(), self.budget_bytes - self.arena.reserved_bytes)
        return needed_bytes > self.budget_bytes - self.arena.used_bytes

    @rule(size_bytes=st.one_of(st.integers(0, 600), st.integers(1, 12_000)))
    def allocate(self, size_bytes):
        needed_bytes = max(1, -(-size_bytes // 512)) * 512
        may_refuse = self.may_refuse(needed_bytes)
        block = self.arena.find_block(size_bytes)
        assert (block is None) == may_refuse
        if block is None:
            return
        for slab in self.device.slabs[len(self.owners) :]:
            self.owners.append([None] * (slab.numel() // 512))
            self.readers.append([set() for _ in range(slab.numel() // 512)])
        assert sum(part.numel() for part in block.parts) == size_bytes
        units = self.list_units(block)
        assert len(units) * 512 == needed_bytes
        self.count += 1
        for slab, unit in units:
            assert self.owners[slab][unit] is None, "handed out twice"
            self.owners[slab][unit] = self.count
            assert {read for read in self.readers[slab][unit] if not read.is_done} <= set(block.reads_to_wait_for)
        assert not any(read.is_done for read in block.reads_to_wait_for)
        for part in block.parts:
            part.fill_(self.count % 251)
        self.blocks.append((self.count, block))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def drop(self, data):
        number, block = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        assert all(torch.all(part == number % 251) for part in block.parts)
        for slab, unit in self.list_units(block):
            self.owners[slab][unit] = None

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def read(self, data):
        _, block = self.blocks[data.draw(st.integers(0, len(self.blocks) - 1))]  # a strategy of blocks would keep them alive
        before, block.place.last_read = block.place.last_read, Read()
        for slab, unit in self.list_units(block):
            self.readers[slab][unit].discard(before)  # waiting for the last copy includes the earlier ones
            self.readers[slab][unit].add(block.place.last_read)
        self.reads.append(block.place.last_read)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def complete_read(self, data):
        self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))).is_done = True

    @precondition(lambda self: not self.blocks)
    @rule()
    def close(self):
        reads = [read for units in self.readers for unit in units for read in unit]
        self.arena.close()
        assert all(read.is_done for read in reads)
        self.device.slabs.clear()
        self.owners.clear()
        self.readers.clear()

    @invariant()
    def bytes_add_up(self):
        if hasattr(self, "arena"):
            used_bytes = sum(512 for owners in self.owners for owner in owners if owner is not None)
            self.peak_bytes = max(self.peak_bytes, used_bytes)
            assert self.arena.used_bytes == used_bytes
            assert self.arena.peak_bytes == self.peak_bytes
            assert self.arena.reserved_bytes == sum(512 * len(owners) for owners in self.owners) <= self.budget_bytes

    def teardown(self):
        if hasattr(self, "arena"):
            self.blocks.clear()
            assert self.arena.used_bytes == 0
            self.arena.close()


class SplittingArenaMachine(ArenaMachine):
    """The same with blocks of several parts, so that every free byte of the budget is usable."""

    min_part_bytes = 512


for machine in (ArenaMachine, SplittingArenaMachine):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestWholeBlocks = ArenaMachine.TestCase
TestMultiPartBlocks = SplittingArenaMachine.TestCase


def make_split_arena(budget_units: int = 1 << 20, device: CpuDevice | None = None, *, part_units: int = 1) -> HostArena:
    return HostArena(device or CpuDevice(), budget=budget_units * 512, slab_bytes=512, min_part_bytes=part_units * 512)


def test_each_part_of_a_block_is_paired_with_its_range_of_the_source():
    arena = make_split_arena(budget_units=5)
    blocks = [arena.find_block(512) for _ in range(5)]
    del blocks[::2]
    source = torch.arange(1200).to(torch.uint8)
    block = arena.find_block(1200)
    for part, byte_range in block.pair(source):
        part.copy_(byte_range)
    found = torch.zeros_like(source)
    for part, byte_range in block.pair(found):
        byte_range.copy_(part)
    assert len(block.parts) == 3
    assert torch.equal(found, source)


def test_splitting_and_merging_ranges_does_not_duplicate_pending_reads():
    arena = make_arena(budget_bytes=8 * 512, slab_bytes=8 * 512, device=ModelDevice())
    block = arena.find_block(8 * 512)
    block.place.last_read = Read()
    del block
    for _ in range(20):
        blocks = [arena.find_block(512) for _ in range(8)]
        assert all(len(block.reads_to_wait_for) == 1 for block in blocks)
        blocks.clear()
    assert len(arena.find_block(8 * 512).reads_to_wait_for) == 1


def test_blocks_can_be_freed_on_any_thread():
    arena = make_arena()
    blocks = [arena.find_block(512) for _ in range(100)]

    def drop() -> None:
        while blocks:
            with contextlib.suppress(IndexError):
                blocks.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        arena.find_block(1024)
    for thread in threads:
        thread.join()
    assert arena.used_bytes == 0
