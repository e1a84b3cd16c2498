"""examples/benchmarks/host_time.py: what the host takes of a step, on the CPU."""

import json
import sys
import time

import pytest
from support.scripts import BENCHMARKS, load_script

MODEL = BENCHMARKS.parents[1] / "arguments" / "tiny_moe.sh"


@pytest.fixture(scope="module")
def script():
    with load_script("host_time") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    monkeypatch.setattr(sys, "argv", ["host_time.py", *map(str, words)])
    return script.main()


def test_waits_are_taken_out_of_what_they_are_in(script, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    clock = script.Clock()
    wait = clock.wrap_wait(lambda: "done")  # one tick
    forward = clock.wrap(wait, "forward")  # begins, waits for one, ends: three
    backward = clock.wrap(lambda: [wait(), wait()], "backward")
    assert [forward(), forward(), backward(), wait()] == ["done", "done", ["done", "done"], "done"]
    found = clock.read(50.0)
    assert (found.step_s, found.forward_s, found.forward_waits_s) == (50.0, 4.0, 2.0)
    assert (found.backward_s, found.backward_waits_s) == (3.0, 2.0)


def test_what_raises_is_counted_and_leaves_the_clock_where_it_was(script):
    clock = script.Clock()

    def fail():
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        clock.wrap(fail, "forward")()
    clock.wrap_wait(lambda: None)()
    assert list(clock.seconds) == ["forward", " waits"]


def test_each_setting_has_its_row_and_every_step_is_written(script, monkeypatch, capsys, tmp_path):
    out = tmp_path / "host.json"
    words = (
        MODEL,
        "--num-layers",
        "1",
        "--settings",
        "nothing",
        "ours:expert_fc1",
        "--steps",
        "2",
        "--warmup",
        "0",
        "--out",
        out,
    )
    assert run(script, monkeypatch, *words) == 0
    document = json.loads(out.read_text())
    assert list(document) == ["nothing", "ours:expert_fc1"]
    shown = capsys.readouterr().out
    for name, steps in document.items():
        assert len(steps) == 2
        row = next(line for line in shown.splitlines() if f" {name} " in line)
        middle = 500 * sum(step["forward_s"] for step in steps)
        assert f"{middle:.1f}" in row
        for step in steps:
            assert 0 < step["forward_s"] + step["backward_s"] < step["step_s"]
            assert (step["forward_waits_s"], step["backward_waits_s"]) == (0.0, 0.0)  # a CPU waits for nothing


def test_a_budget_which_nobody_plans_for_here_is_refused_in_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "open_runner", None)  # a model would be built with it
    assert run(script, monkeypatch, MODEL, "--settings", "nothing", "budget:1MiB") == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert error.startswith("budget:1.00MiB needs a plan, and has none here. Give a plan file")
    assert error.count("\n") == 1


def test_a_model_of_several_processes_is_refused_in_one_line(script, monkeypatch, capsys):
    assert run(script, monkeypatch, MODEL, "--pipeline-model-parallel-size", "2") == 2
    error = capsys.readouterr().err
    assert "the model takes 2 processes. Give smaller parallel sizes." in error
    assert error.count("\n") == 1
