"""The table of where the time of traced steps goes, of traces made by hand."""

import gzip
import json

import pytest

from fgoffload.benchmark.job import name_trace
from fgoffload.benchmark.settings import NOTHING, parse_setting
from fgoffload.benchmark.trace_report import HEADINGS, build_trace_table, format_traces, read_traces

OURS = parse_setting("ours:expert_fc1")


def write(folder, setting, *rows, rank=0):
    """Write a trace of rows of category, name, begin, end and correlation, in microseconds."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": {"correlation": correlation}}
        for cat, name, begin, end, correlation in rows
    ]
    (folder / name_trace(setting, rank=rank)).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the trace of `nothing`, without a gap, and of a setting with two gaps and copies."""
    write(tmp_path, NOTHING, ("kernel", "a", 0, 5000, 1), ("kernel", "b", 5000, 9000, 2))
    write(
        tmp_path,
        OURS,
        ("kernel", "a", 0, 2000, 1),
        ("cuda_runtime", "cudaLaunchKernel", 1990, 2400, 2),
        ("kernel", "b", 2500, 6000, 2),
        ("cuda_runtime", "cudaLaunchKernel", 3000, 3010, 3),
        ("kernel", "c", 6250, 10000, 3),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2100, 4100, 4),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6000, 7000, 5),
    )
    return tmp_path


def test_each_setting_that_left_a_trace_has_its_times(folder):
    rows = read_traces(folder, (NOTHING, OURS, parse_setting("recompute:full"), NOTHING))
    assert rows == {
        "nothing": ("9.0", "9.0", "0.0", "0.00", "0.0", "0.00", "0.0", "0.0"),
        "ours:expert_fc1": ("10.0", "9.2", "0.5", "0.50", "0.2", "0.25", "2.0", "1.0"),
    }


def test_each_rank_has_a_row_and_what_more_ranks_left_another_time_has_none(folder):
    for rank, end in ((1, 8000), (2, 7000)):
        write(folder, OURS, ("kernel", "a", 0, end, 1), rank=rank)
    rows = read_traces(folder, (NOTHING, OURS), ranks=2)
    assert list(rows) == ["nothing", "ours:expert_fc1", "ours:expert_fc1, rank 1"]
    assert rows["ours:expert_fc1, rank 1"][0] == "8.0"


def test_the_page_and_the_table_have_a_row_for_each(folder):
    rows = read_traces(folder, (NOTHING, OURS))
    page = format_traces(rows).splitlines()
    assert page[0] == f"| {' | '.join(HEADINGS)} |"
    assert page[3].startswith("| ours:expert_fc1 | 10.0 | 9.2 | 0.5 |")
    assert build_trace_table(rows).row_count == 2


def test_without_a_kernel_the_page_says_why(tmp_path):
    write(tmp_path, NOTHING, ("cpu_op", "aten::add", 0, 10, 1))
    assert read_traces(tmp_path, (NOTHING,)) == {}
    assert "no GPU" in format_traces({})
