"""examples/benchmarks/measure_waits.py: three settings in one process, on the CPU, and the remedies left out of one of them."""

import json
import logging
import re
import statistics
import sys
from pathlib import Path

import pytest
from support.scripts import load_script
from support.trainings import MOE, make_config, make_trainer

from fgoffload.benchmark.idle import WAIT_RANGE, find_idle_time
from fgoffload.benchmark.traces import read_events
from fgoffload.integrations.megatron import layers, waits
from fgoffload.integrations.megatron.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.imports import load_module

ROOT = Path(__file__).parents[3]
NAMES = ["no offload", "before", "after"]
ATTENTION = ("core_attn", "attn_proj")


@pytest.fixture(scope="module")
def script():
    with load_script("measure_waits") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    monkeypatch.setattr(sys, "argv", ["measure_waits.py", *map(str, words)])
    return script.main()


def test_the_table_has_a_row_for_each_setting_with_what_it_measured(script, tmp_path, monkeypatch, capsys):
    model = (ROOT / "arguments" / "tiny_moe.sh", "--num-layers", "2")
    numbers = ("--steps", "3", "--warmup", "1", "--repeats", "2")
    assert run(script, monkeypatch, *model, *numbers, "--out", tmp_path / "out", "--trace", tmp_path / "traces") == 0
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "waits.json").read_text())
    runs = document["runs"]
    # In turn, so that a machine that drifts drifts for all.
    assert [(one["remedies"], one["repeat"]) for one in runs] == [(name, repeat) for repeat in range(2) for name in NAMES]
    assert all(len(one["step_seconds"]) == 3 and min(one["step_seconds"]) > 0 for one in runs)
    # At least query, key, value and output in fp32, of 2 layers and 4 microbatches; the same with remedies and without.
    moved = {name: {one["d2h_bytes"] for one in runs if one["remedies"] == name} for name in NAMES}
    assert moved["no offload"] == {0}
    assert moved["before"] == moved["after"]
    assert min(moved["after"]) >= 2 * 4 * 4 * 256 * 128 * 4
    assert {one["idle"] for one in runs} == {None}
    assert "No kernel was traced" in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == NAMES
    for name, (_, step, over, peak, d2h) in zip(NAMES, rows, strict=True):
        steps = [1e3 * seconds for one in runs if one["remedies"] == name for seconds in one["step_seconds"]]
        middle, low, high = map(float, re.fullmatch(r"([\d.]+) \(([\d.]+) ([\d.]+)\)", step).groups())
        assert middle == pytest.approx(statistics.median(steps), abs=0.051)
        assert min(steps) - 0.051 <= low <= middle <= high <= max(steps) + 0.051
        assert peak == "-"
        assert (over == "-", d2h == "0 B") == ((True, True) if name == "no offload" else (False, False))
    # Over the plain step of the same repeat.
    medians = [1e3 * statistics.median(one["step_seconds"]) for one in runs]
    over = [float(number) for number in rows[2][2].split(", ")]
    assert over == pytest.approx([medians[2] - medians[0], medians[5] - medians[3]], abs=0.051)
    # One wait in each layer and microbatch, marked in each trace.
    traces = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in traces] == [f"trace_{name}.json.gz" for name in ("after", "before", "no_offload")]
    for path in traces:
        assert sum(event["name"] == WAIT_RANGE for event in read_events(path)) == 2 * 4


def test_what_moves_nothing_and_what_megatron_does_not_know_is_refused_in_one_line(script, monkeypatch, capsys):
    model = (ROOT / "arguments" / "tiny_moe.sh", "--num-layers", "1", "--steps", "1", "--warmup", "0", "--repeats", "1")
    assert run(script, monkeypatch, *model, "--min-offloaded-tensor-size", "100000000") == 2
    assert "--tags core_attn attn_proj move nothing in this model." in capsys.readouterr().err
    assert run(script, monkeypatch, *model, "--no-such-flag") == 2
    error = capsys.readouterr().err
    assert "--no-such-flag" in error
    assert error.count("\n") == 1


def list_order(caplog):
    """Return where the attention's first group leaves in a step, and where the first layer's experts begin."""
    caplog.clear()
    with make_trainer(f"{MOE} --global-batch-size 2", make_config("core_attn")) as trainer, caplog.at_level(logging.DEBUG):
        router = trainer.chunks[0].decoder.layers[0].mlp.router
        router.register_forward_pre_hook(lambda *_: logging.getLogger("test").debug("router"))
        trainer.run_step()
    lines = [record.getMessage() for record in caplog.records]
    left = next(index for index, line in enumerate(lines) if line.startswith("offload layers.0.core_attn"))
    return "attention, router" if left < lines.index("router") else "router, attention"


@pytest.mark.usefixtures("parallel")
def test_without_remedies_nothing_is_held_and_nothing_goes_around_the_copy_engine(script, caplog):
    module = load_module(DISPATCHERS)
    before = waits.step_aside, layers.has_held_wait
    assert list_order(caplog) == "router, attention"
    with script.leave_out_remedies():
        assert list_order(caplog) == "attention, router"
        with make_trainer(MOE, make_config("core_attn")):
            assert not hasattr(module.maybe_move_tensor_to_cpu, "__wrapped__")
    assert (waits.step_aside, layers.has_held_wait) == before
    with make_trainer(MOE, make_config("core_attn")):
        assert hasattr(module.maybe_move_tensor_to_cpu, "__wrapped__")
    assert list_order(caplog) == "router, attention"


def test_the_table_of_a_traced_step_says_how_much_of_its_idle_time_lies_at_waits(script):
    def event(cat, name, begin, end):
        return {"cat": cat, "name": name, "ts": 1e3 * begin, "dur": 1e3 * (end - begin)}

    events = [
        event("kernel", "gemm", 0, 10),
        event("user_annotation", WAIT_RANGE, 4, 17),
        event("cuda_runtime", "cudaStreamSynchronize", 5, 16),
        event("kernel", "void cub::scan<int>(int)", 18, 30),
        event("kernel", "gemm", 33, 40),
    ]
    known = {"repeat": 0, "step_seconds": (0.04,), "peak_allocated_bytes": 5, "d2h_bytes": 3}
    traced = script.Run(remedies=script.Remedies.BEFORE, idle=find_idle_time(events), **known)
    rows = script.list_idle_rows([traced, script.Run(remedies=script.Remedies.AFTER, **known)])
    assert rows == [("before", "40.0", "29.0", "1", "1", "8.0", "8.00", "6.0", "3.0", "8.00, scan")]
    assert len(rows[0]) == len(script.IDLE_HEADINGS)
    idle = traced.to_fields()["idle"]
    assert (idle["gaps"], idle["at_waits_ms"], idle["in_waits_ms"], idle["elsewhere_ms"]) == (2, 8.0, 6.0, 3.0)
    assert idle["by_kernel"] == {
        "cub::scan": {"gaps": 1, "ms": 8.0, "longest_ms": 8.0},
        "gemm": {"gaps": 1, "ms": 3.0, "longest_ms": 3.0},
    }
    json.dumps(traced.to_fields())
