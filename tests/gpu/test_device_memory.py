"""Tests the allocator readings of `--offload-modules auto`: current bytes, peak since the last reading, and overall peak."""

import pytest
import torch

from fgoffload.integrations.megatron.profile.device_memory import find_device_memory

NBYTES = 8 << 20
"""Size of a tensor: a multiple of the allocator's granularity."""


@pytest.fixture
def memory():
    found = find_device_memory("cuda")
    found.take_peak()
    return found


def allocate(tensors):
    """Allocate `tensors` tensors at once, and free them."""
    kept = [torch.empty(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(tensors)]
    kept.clear()


def test_counting_the_peak_does_not_reset_it(memory):
    start_bytes = memory.count_allocated()
    allocate(3)
    assert memory.count_peak() == start_bytes + 3 * NBYTES
    allocate(1)
    assert memory.count_peak() == start_bytes + 3 * NBYTES
    assert memory.count_allocated() == start_bytes


def test_reading_resets_the_current_peak_and_take_peak_resets_the_overall_peak(memory):
    start_bytes = memory.count_allocated()
    allocate(3)
    assert memory.read().peak_bytes == start_bytes + 3 * NBYTES
    assert memory.count_peak() == start_bytes
    allocate(2)
    assert memory.read().peak_bytes == start_bytes + 2 * NBYTES
    assert memory.take_peak() == start_bytes + 3 * NBYTES
    assert memory.take_peak() == start_bytes
