"""The arena: exact bytes, no double hand-out, everything joined again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload import InternalError
from fgoffload.engine import CpuDevice, HostArena


def make_arena(budget_bytes: int = 1 << 20, slab_bytes: int = 1 << 16, device: CpuDevice | None = None) -> HostArena:
    return HostArena(device or CpuDevice(), budget_bytes=budget_bytes, slab_bytes=slab_bytes)


def test_a_block_has_the_bytes_asked_for_and_slabs_are_not_rounded_to_powers_of_two():
    arena = make_arena()
    block = arena.find_block(100_000)
    assert block.buffer.shape == (100_000,)
    assert arena.reserved_bytes == 100_352  # the next multiple of 512
    assert arena.used_bytes == 100_352


def test_the_budget_is_never_exceeded_and_used_to_its_end():
    arena = make_arena(budget_bytes=10 * 512, slab_bytes=4 * 512)
    blocks = [arena.find_block(512) for _ in range(11)]
    assert [block is not None for block in blocks] == [True] * 10 + [False]
    assert arena.reserved_bytes == 10 * 512
    assert arena.find_block(0) is None
    blocks.clear()
    assert arena.used_bytes == 0
    assert arena.find_block(512) is not None


def test_returned_neighbours_become_one_range_again():
    arena = make_arena(budget_bytes=8 * 512, slab_bytes=8 * 512)
    blocks = [arena.find_block(512) for _ in range(8)]
    for index in (1, 3, 5, 7, 0, 2, 4, 6):
        blocks[index] = None
    assert arena.find_block(8 * 512) is not None


def test_the_smallest_range_that_fits_is_taken():
    arena = make_arena(budget_bytes=16 * 512, slab_bytes=16 * 512)
    first, wall, second, rest = (arena.find_block(n * 512) for n in (4, 1, 2, 9))
    start = second.buffer.data_ptr()
    del first, second
    assert arena.find_block(2 * 512).buffer.data_ptr() == start
    del wall, rest


class Pending(CpuDevice):
    """Events pass when their list is emptied."""

    def is_done(self, event) -> bool:
        return not event


def test_who_writes_a_range_next_gets_the_reads_that_are_still_under_way():
    arena = make_arena(budget_bytes=4 * 512, slab_bytes=4 * 512, device=Pending())
    read, done = ["under way"], []
    blocks = [arena.find_block(512) for _ in range(4)]
    blocks[0].last_read, blocks[1].last_read = read, done
    blocks[0] = blocks[1] = None
    assert arena.find_block(2 * 512).reads_to_wait_for == (read,)
    blocks.clear()
    again = arena.find_block(4 * 512)
    assert again.reads_to_wait_for == (read,)  # and the other two are joined to it
    read.clear()
    del again
    assert arena.find_block(4 * 512).reads_to_wait_for == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_range_that_is_joined_keeps_the_reads_of_both_neighbours(order):
    arena = make_arena(budget_bytes=3 * 512, slab_bytes=3 * 512, device=Pending())
    blocks = [arena.find_block(512) for _ in range(3)]
    for index in (0, 1):
        blocks[index].last_read = [f"read {index}"]
    for index in order:
        blocks[index] = None
    assert sorted(arena.find_block(2 * 512).reads_to_wait_for) == [["read 0"], ["read 1"]]


def test_closing_with_a_block_in_use_is_a_fault_of_ours():
    arena = make_arena()
    block = arena.find_block(512)
    with pytest.raises(InternalError, match="closed with 512 bytes in use"):
        arena.close()
    del block
    arena.close()
    assert arena.reserved_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 20_000), st.just(None)), max_size=200), st.randoms(use_true_random=False))
def test_no_byte_is_handed_out_twice(requests, random):
    # The model: the blocks that live, each with a number of its own in all of its bytes.
    arena = make_arena(budget_bytes=64 * 1024, slab_bytes=16 * 1024)
    living: list[tuple[int, object]] = []
    for number, size_bytes in enumerate(requests):
        if size_bytes is None:
            if living:
                living.pop(random.randrange(len(living)))
        else:
            block = arena.find_block(size_bytes)
            if block is not None:
                block.buffer.fill_(number % 251)
                living.append((number % 251, block))
            block = None
        assert sum(-(-block.buffer.numel() // 512) * 512 for _, block in living) == arena.used_bytes
        assert arena.reserved_bytes <= 64 * 1024
    for mark, block in living:
        assert torch.all(block.buffer == mark)
    mark = block = None
    living.clear()
    arena.close()
