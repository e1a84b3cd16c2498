"""When a device stood idle, in traces made by hand: times in microseconds, and what comes out in milliseconds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.benchmark.idle import WAIT_RANGE, find_idle_time

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


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(SPANS, st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4))
def test_idle_time_is_what_a_count_of_every_microsecond_finds(kernels, waits):
    events = [kernel(begin, begin + length, stream=index % 3) for index, (begin, length) in enumerate(kernels)]
    calls, clock = [], 0
    for pause, length in waits:
        calls.append((clock + pause, clock + pause + length))
        clock += pause + length
    events += [wait_range(0, 100), *(synchronize(*call) for call in calls)]
    running = {at for begin, length in kernels for at in range(begin, begin + length)}
    idle = set(range(min(running), max(running))) - running
    waiting = {at for begin, end in calls for at in range(begin, end)}
    found = find_idle_time(events)
    assert found.idle_ms == pytest.approx(len(idle) / 1e3)
    assert found.busy_ms == pytest.approx(len(running) / 1e3)
    assert sum(gap.waiting_ms for gap in found.gaps) == pytest.approx(len(idle & waiting) / 1e3)
    ends = {end for _, end in calls}
    assert [gap.is_at_wait for gap in found.gaps] == [
        any(gap.span.begin_us <= end <= gap.span.end_us for end in ends) for gap in found.gaps
    ]
