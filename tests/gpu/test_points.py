"""Tests threads, streams, exceptions, out-of-memory, autocast, checkpoints, fp8 and pageable memory on CUDA."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.hostile import HostileGpu
from support.points import POINTS, Case, fail_in_backward, plain
from support.programs import are_bitwise_identical, check_can_reveal_faults

from fgoffload import TransferPolicy
from fgoffload.engine import AcceleratorDevice, Device, OffloadEngine
from fgoffload.engine.geometry import View
from fgoffload.transfer_config import HostMemory

pytestmark = pytest.mark.usefixtures("_deterministic", "_any_stream_may_accumulate")

NBYTES = 256 * 256 * 4


def make_engine(device: Device | None = None, *, window_bytes: int = 0, prefetch_bytes: int = 2 * NBYTES) -> OffloadEngine:
    policy = TransferPolicy(window_bytes=window_bytes, prefetch_bytes=prefetch_bytes)
    return OffloadEngine(device=device or HostileGpu(late={"d2h", "h2d"}), policy=policy, host_budget_bytes=64 << 20)


def check_no_leaks(engine: OffloadEngine) -> None:
    """Check that no host memory is in use. Autograd's thread may release its last node after `backward` returns."""
    deadline = time.monotonic() + 5
    while engine.arena.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.arena.used_bytes == 0


def close(engine: OffloadEngine) -> None:
    assert engine.finish_step().d2h_bytes > 0
    check_no_leaks(engine)
    engine.close()
    assert engine.arena.reserved_bytes == 0


@pytest.mark.parametrize("name", POINTS)
def test_results_are_bitwise_identical_with(name):
    case, engine = Case("cuda"), make_engine()
    expected = case.run(POINTS[name], None)
    check_can_reveal_faults(expected)
    for _ in range(2):
        assert are_bitwise_identical(expected, case.run(POINTS[name], engine))
    close(engine)


def test_three_backwards_of_a_retained_graph_are_bitwise_identical():
    case, engine = Case("cuda"), make_engine()
    expected = case.run(plain, None, backwards=3)
    assert are_bitwise_identical(expected, case.run(plain, engine, backwards=3))
    close(engine)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_steps_with_pageable_host_memory_are_bitwise_identical(prefetch_bytes):
    device = AcceleratorDevice(host_memory=HostMemory.PAGEABLE)
    case, engine = Case("cuda"), make_engine(device, prefetch_bytes=prefetch_bytes)
    expected = case.run(plain, None)
    for _ in range(3):
        assert are_bitwise_identical(expected, case.run(plain, engine))
    close(engine)


def test_a_step_on_a_side_stream_is_bitwise_identical():
    case, engine, side = Case("cuda"), make_engine(), torch.cuda.Stream()
    expected = case.run(plain, None)
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = case.run(plain, engine)
        torch.cuda.current_stream().wait_stream(side)
        assert are_bitwise_identical(expected, found)
    close(engine)


@pytest.mark.parametrize("late", [set(), {"d2h"}, {"h2d"}], ids=["none late", "d2h late", "h2d late"])
def test_two_threads_with_separate_streams_can_share_an_engine(late):
    cases = [Case("cuda", seed=seed) for seed in range(2)]
    expected = [case.run(plain, None) for case in cases]
    expected = [[tensor.clone() for tensor in tensors] for tensors in expected]
    engine = make_engine(HostileGpu(late=late, probability=0.3, milliseconds=1.0), window_bytes=2 * NBYTES)
    torch.cuda.synchronize()

    def train(index: int) -> list[bool]:
        same = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                found = cases[index].run(plain, engine, microbatch=index)
                torch.cuda.current_stream().synchronize()
                same.append(are_bitwise_identical(expected[index], found))
        return same

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(train, range(2)))
    assert results == [[True] * 10] * 2
    torch.cuda.synchronize()
    close(engine)


def test_an_exception_in_backward_leaks_nothing_and_the_next_step_is_correct():
    case, engine = Case("cuda"), make_engine()
    expected = case.run(plain, None)
    with pytest.raises(ValueError, match="the user's own"):
        fail_in_backward(case, engine)
    check_no_leaks(engine)
    assert are_bitwise_identical(expected, case.run(plain, engine))
    close(engine)


class FullOnce(HostileGpu):
    """Fails one allocation, as torch does when the device is full."""

    is_full = False

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        self._check()
        return super().allocate_device(size_bytes)

    def allocate_like(self, view: View) -> torch.Tensor:
        self._check()
        return super().allocate_like(view)

    def _check(self) -> None:
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("CUDA out of memory, raised by the test.")


def test_out_of_memory_during_a_reload_raises_and_the_next_step_is_correct():
    device = FullOnce(late={"h2d"})
    case, engine = Case("cuda"), make_engine(device)
    expected = case.run(plain, None)

    def run_full() -> None:
        case.run(lambda sites, x, w: _fill_device(plain(sites, x, w), device), engine)

    with pytest.raises(torch.OutOfMemoryError, match="raised by the test"):
        run_full()
    check_no_leaks(engine)
    assert are_bitwise_identical(expected, case.run(plain, engine))
    close(engine)


def _fill_device(output: torch.Tensor, device: FullOnce) -> torch.Tensor:
    device.is_full = True
    return output
