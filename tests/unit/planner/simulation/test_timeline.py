"""Tests the Chrome trace of a simulated step: the fields that a viewer needs, and lanes and memory worked out by hand."""

import json

import pytest
from support.rank_models import STATIC_BYTES, make_chunk, make_layer, make_rank, offload

from fgoffload import ConfigError, OffloadPlan
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.simulation.simulator import Detail, simulate
from fgoffload.planner.simulation.timeline import write_chrome_trace

FC1 = make_layer({"expert_fc1": 100})
"""20 s forward, 40 s backward, and 100 bytes."""


@pytest.fixture
def events(tmp_path):
    """Return the events of one offloaded layer, 10 s each way, followed by 20 and 40 s of other ops."""
    output = (Segment(name="output", forward_s=20.0, backward_s=40.0),)
    result = simulate([make_rank(make_chunk(FC1, last=output))], offload("expert_fc1", (0,)), detail=Detail.TIMELINE)
    write_chrome_trace(result, tmp_path / "trace.json", rank=0)
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def list_spans(events, thread):
    return [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in events if one["ph"] == "X" and one["tid"] == thread]


def test_spans_are_in_microseconds_and_say_what_ran(events):
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


def test_memory_is_a_counter_that_changes_where_it_does(events):
    counters = {
        name: [(one["ts"] / 1e6, one["args"]["bytes"]) for one in events if one["ph"] == "C" and one["name"] == name]
        for name in ("device memory", "host memory")
    }
    full = STATIC_BYTES + 100
    # Released at 80, when backward asks and the engine looks, and back in the same moment.
    assert counters["device memory"] == [(0, STATIC_BYTES), (20, full), (130, STATIC_BYTES)]
    assert counters["host memory"] == [(0, 0), (20, 100), (130, 0)]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    result = simulate([make_rank(make_chunk(FC1))], OffloadPlan(actions={}), detail=Detail.TIMELINE)
    with pytest.raises(ConfigError, match=r"trace file .*nowhere.*No such file"):
        write_chrome_trace(result, tmp_path / "nowhere" / "trace.json", rank=0)
