"""Compares the Chrome trace of a simulated step with spans and memory counters worked out by hand."""

import json

import pytest
from support.rank_models import STATIC_BYTES, make_chunk, make_layer, make_rank, offload

from fgoffload import ConfigError, OffloadPlan
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.simulation.simulator import Detail, simulate
from fgoffload.planner.simulation.timeline import write_chrome_trace

FC1 = make_layer({"expert_fc1": 100})
"""A layer with 20 s of forward, 40 s of backward and 100 saved bytes."""


@pytest.fixture
def events(tmp_path):
    """Return the trace events of one offloaded layer, with 10 s per copy, and an output segment of 20 s and 40 s."""
    output = (Segment(name="output", forward_s=20.0, backward_s=40.0),)
    result = simulate([make_rank(make_chunk(FC1, last=output))], offload("expert_fc1", (0,)), detail=Detail.TIMELINE)
    write_chrome_trace(result, tmp_path / "trace.json", rank=0)
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def list_spans(events, thread):
    return [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in events if one["ph"] == "X" and one["tid"] == thread]


def test_spans_are_labelled_and_in_microseconds(events):
    assert list_spans(events, 0) == [
        ("F0 layers.0.expert_fc1", 0, 20),
        ("F0 output", 20, 20),
        ("B0 output", 40, 40),
        ("wait for a reload", 80, 10),
        ("B0 layers.0.expert_fc1", 90, 40),
    ]
    assert list_spans(events, 1) == [("F0 layers.0.expert_fc1", 20, 10)]
    assert list_spans(events, 2) == [("B0 reload of layers.0.expert_fc1", 80, 10)]
    assert [one["args"]["bytes"] for one in events if one["ph"] == "X" and one["tid"]] == [100, 100]


def test_memory_counters_change_at_allocations_and_frees(events):
    counters = {
        name: [(one["ts"] / 1e6, one["args"]["bytes"]) for one in events if one["ph"] == "C" and one["name"] == name]
        for name in ("device memory", "host memory")
    }
    full = STATIC_BYTES + 100
    # At 80, backward unpacks the tensor: the engine frees its GPU memory and allocates it for the reload at once.
    assert counters["device memory"] == [(0, STATIC_BYTES), (20, full), (130, STATIC_BYTES)]
    assert counters["host memory"] == [(0, 0), (20, 100), (130, 0)]


def test_an_unwritable_trace_file_is_rejected(tmp_path):
    result = simulate([make_rank(make_chunk(FC1))], OffloadPlan(actions={}), detail=Detail.TIMELINE)
    with pytest.raises(ConfigError, match=r"trace file .*nowhere.*No such file"):
        write_chrome_trace(result, tmp_path / "nowhere" / "trace.json", rank=0)
