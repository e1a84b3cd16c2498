"""When a device stood idle, in traces made by hand: times in microseconds, and what comes out in milliseconds."""

import pytest
from support.scripts import load_script

with load_script("idle_time") as idle_time:
    WAIT_RANGE, find_idle_time = idle_time.WAIT_RANGE, idle_time.find_idle_time

SCAN = "void at_cuda_detail::cub::DeviceScanKernel<Policy<int>, int const*>(int const*, int)"


def event(cat, name, begin, end, **arguments):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def kernel(begin, end, name="k", stream=7):
    return event("kernel", name, begin, end, stream=stream)


def wait_range(begin, end):
    return event("user_annotation", WAIT_RANGE, begin, end)


def synchronize(begin, end, name="cudaStreamSynchronize"):
    return event("cuda_runtime", name, begin, end, correlation=99)


def copy(begin, end, kind="DtoH (Device -> Pinned)", correlation=1):
    return event("gpu_memcpy", f"Memcpy {kind}", begin, end, correlation=correlation)


BEHIND_A_COPY = [
    kernel(0, 100),
    kernel(50, 150, stream=13),  # the experts' own stream
    kernel(400, 500, SCAN),
    kernel(520, 600),
    copy(100, 350),
    copy(350, 352, correlation=2),
    event("gpu_memset", "Memset (Device)", 505, 510),
    event("cuda_runtime", "cudaMemcpyAsync", 120, 125, correlation=2),
    synchronize(130, 360),
    wait_range(110, 390),
    synchronize(505, 519),  # somebody else's: no dispatcher waits
]
"""The host waits for a few bytes behind a long copy, and launches the scan 40 us after they have come."""


def test_the_gap_in_which_the_host_comes_back_from_a_wait_is_the_waits():
    found = find_idle_time(BEHIND_A_COPY)
    assert found.span_ms == pytest.approx(0.6)
    assert found.busy_ms == pytest.approx(0.33)  # 0 to 150 on two streams, 400 to 500, 520 to 600
    assert found.waits == 1
    assert [(gap.span, gap.kernel, gap.is_at_wait) for gap in found.gaps] == [
        ((150, 400), "at_cuda_detail::cub::DeviceScanKernel", True),
        ((500, 520), "k", False),
    ]
    assert [gap.waiting_ms for gap in found.gaps] == pytest.approx([0.21, 0.0])  # 150 to 360
    assert found.at_waits == (found.gaps[0],)
    assert found.longest is found.gaps[0]
    assert found.elsewhere_ms == pytest.approx(0.02)
