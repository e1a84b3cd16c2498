"""examples/benchmarks/measure_waits.py: three settings in one process, on the CPU, and the remedies left out of one of them."""

import json
import sys
from pathlib import Path

import pytest
from support.scripts import load_script

from fgoffload.benchmark.idle import WAIT_RANGE
from fgoffload.benchmark.traces import read_events

ROOT = Path(__file__).parents[3]
NAMES = ["no offload", "before", "after"]


@pytest.fixture(scope="module")
def script():
    with load_script("measure_waits") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    monkeypatch.setattr(sys, "argv", ["measure_waits.py", *map(str, words)])
    return script.main()


@pytest.mark.slow
def test_the_table_has_a_row_for_each_setting_with_what_it_measured(script, tmp_path, monkeypatch, capsys):
    model = (ROOT / "arguments" / "tiny_moe.sh", "--num-layers", "1")
    numbers = ("--steps", "1", "--warmup", "1", "--repeats", "1")
    assert run(script, monkeypatch, *model, *numbers, "--out", tmp_path / "out", "--trace", tmp_path / "traces") == 0
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "waits.json").read_text())
    runs = document["runs"]
    # In turn, so that a machine that drifts drifts for all.
    assert [(one["remedies"], one["repeat"]) for one in runs] == [(name, repeat) for repeat in range(1) for name in NAMES]
    assert all(len(one["step_seconds"]) == 1 and min(one["step_seconds"]) > 0 for one in runs)
    # At least query, key, value and output in fp32, of one layer and 4 microbatches; the same with remedies and without.
    moved = {name: {one["d2h_bytes"] for one in runs if one["remedies"] == name} for name in NAMES}
    assert moved["no offload"] == {0}
    assert moved["before"] == moved["after"]
    assert min(moved["after"]) >= 4 * 4 * 256 * 128 * 4
    assert {one["idle"] for one in runs} == {None}
    assert "No kernel was traced" in shown
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert rows == NAMES
    # One wait in each layer and microbatch, marked in each trace.
    traces = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in traces] == [f"trace_{name}.json.gz" for name in ("after", "before", "no_offload")]
    for path in traces:
        assert sum(event["name"] == WAIT_RANGE for event in read_events(path)) == 4
