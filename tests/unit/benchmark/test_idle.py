"""When a device stood idle, in traces made by hand: times in microseconds, and what comes out in milliseconds."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.benchmark.idle import WAIT_RANGE, find_idle_time, list_waits, shorten
from fgoffload.benchmark.traces import is_copy, read_events, write_trace

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


def test_it_does_not_matter_who_brings_the_bytes():
    # A kernel writes them to the host: no copy in the trace.
    events = [one for one in BEHIND_A_COPY if one["cat"] != "gpu_memcpy"]
    assert find_idle_time(events) == find_idle_time(BEHIND_A_COPY)


def test_a_wait_that_is_over_while_kernels_run_costs_nothing():
    found = find_idle_time([kernel(0, 100), kernel(130, 200), wait_range(10, 90), synchronize(20, 80)])
    assert (found.waits, found.at_waits) == (1, ())
    assert found.elsewhere_ms == pytest.approx(0.03)


def test_a_wait_that_begins_in_a_gap_and_ends_in_a_kernel_is_not_why_the_kernel_came_late():
    found = find_idle_time([kernel(0, 100), kernel(130, 200), wait_range(110, 190), synchronize(120, 180)])
    assert found.at_waits == ()
    assert found.gaps[0].waiting_ms == pytest.approx(0.01)


def test_two_waits_in_one_gap_are_one_gap():
    events = [kernel(0, 10), kernel(100, 110), wait_range(20, 60), synchronize(25, 50), synchronize(52, 58)]
    found = find_idle_time(events)
    assert (found.waits, len(found.at_waits)) == (2, 1)
    assert found.gaps[0].waiting_ms == pytest.approx(0.031)


def test_a_copy_to_memory_that_is_not_locked_is_a_wait_and_one_to_locked_memory_is_none():
    call = event("cuda_runtime", "cudaMemcpyAsync", 20, 50, correlation=5)
    pageable, pinned = (copy(30, 48, f"DtoH (Device -> {kind})", correlation=5) for kind in ("Pageable", "Pinned"))
    assert list_waits([wait_range(10, 60), call, pageable]) == [(20, 50)]
    assert list_waits([wait_range(10, 60), call, pinned]) == []


def test_ranges_in_each_other_count_a_wait_once_and_each_call_in_them():
    events = [wait_range(0, 100), wait_range(10, 20), synchronize(12, 18), synchronize(50, 60, "cudaEventSynchronize")]
    assert list_waits(events) == [(12, 18), (50, 60)]


def launch(begin, end, correlation):
    return event("cuda_runtime", "cudaLaunchKernel", begin, end, correlation=correlation)


def launched_kernel(begin, end, correlation):
    return event("kernel", "k", begin, end, stream=7, correlation=correlation)


def test_a_gap_is_the_hosts_where_the_next_kernel_was_launched_only_in_it():
    kernels = [
        launched_kernel(0, 100, 1),
        launched_kernel(130, 200, 2),
        launched_kernel(250, 300, 3),
        launched_kernel(301, 310, 4),
    ]
    # The second was launched in time, and waited for something; the third while the device was idle; of the last nobody knows.
    found = find_idle_time([*kernels, launch(10, 15, 1), launch(90, 99, 2), launch(196, 240, 3)])
    assert [gap.is_late_launch for gap in found.gaps] == [False, True, False]
    assert (found.late_ms, found.idle_ms) == pytest.approx((0.05, 0.081))


def test_without_kernels_nothing_is_known():
    assert find_idle_time([wait_range(0, 10), event("cpu_op", "aten::add", 0, 5)]) is None


def test_one_kernel_leaves_no_gap():
    found = find_idle_time([kernel(5, 10)])
    assert (found.gaps, found.longest, found.idle_ms, found.span_ms) == ((), None, 0, 0.005)


def test_gaps_are_summed_by_the_kernel_that_ends_them():
    kernels = [kernel(0, 10), kernel(20, 30, "a"), kernel(60, 70, "b"), kernel(75, 80, "a")]
    sums = find_idle_time(kernels).sum_by_kernel()
    assert list(sums) == ["b", "a"]
    assert sums["b"] == pytest.approx((1, 0.03, 0.03))
    assert sums["a"] == pytest.approx((2, 0.015, 0.01))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SCAN, "at_cuda_detail::cub::DeviceScanKernel"),
        ("void at::native::(anonymous namespace)::copy_kernel<float>(float*)", "at::native::copy_kernel"),
        ("sm90_xmma_gemm_bf16", "sm90_xmma_gemm_bf16"),
    ],
)
def test_a_kernels_name_is_shown_without_its_types(name, short):
    assert shorten(name) == short


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=200)
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


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_events_that_take_time_are_read_packed_or_not(name, tmp_path):
    path = tmp_path / name
    text = json.dumps({"traceEvents": [kernel(0, 1), {"ph": "M", "name": "process_name"}]}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    assert read_events(path) == [kernel(0, 1)]


def test_a_trace_that_the_profiler_writes_has_the_ranges_of_what_ran(tmp_path):
    import torch

    def run():
        with torch.profiler.record_function(WAIT_RANGE):
            torch.ones(2).sum()

    write_trace(run, tmp_path / "trace.json.gz")
    events = read_events(tmp_path / "trace.json.gz")
    assert [one["cat"] for one in events if one["name"] == WAIT_RANGE] == ["user_annotation"]
    assert "aten::ones" in {one["name"] for one in events}


def test_copies_are_told_by_their_way():
    assert is_copy(copy(0, 1), way="DtoH")
    assert not is_copy(copy(0, 1), way="HtoD")
    assert not is_copy(kernel(0, 1, "Memcpy DtoH"), way="DtoH")
