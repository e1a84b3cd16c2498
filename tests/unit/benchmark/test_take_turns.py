"""examples/benchmarks/take_turns.py: settings in processes of their own, step by step in turn, on the CPU."""

import json
import sys
from pathlib import Path

import pytest
from support.scripts import BENCHMARKS, load_script

ROOT = Path(__file__).parents[3]
MODEL = (ROOT / "arguments" / "tiny_moe.sh", "--num-layers", "1")


@pytest.fixture(scope="module")
def script():
    with load_script("take_turns") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    # A process that is spawned finds the functions of this one by the name of their module.
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["take_turns.py", *map(str, words)])
    return script.main()


@pytest.mark.slow
def test_the_table_and_the_file_have_what_each_process_measured(script, tmp_path, monkeypatch, capsys):
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--repeats", "1", "--out", tmp_path)
    assert run(script, monkeypatch, *MODEL, *words) == 0
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "turns.json").read_text())
    (repeat,) = document["repeats"]
    assert document["peak_allocated_bytes"] == [dict.fromkeys(repeat)]  # no allocator counts on a CPU
    assert list(repeat) == ["nothing", "ours:expert_fc1"]
    assert all(len(steps) == 3 and min(steps) > 0 for steps in repeat.values())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == list(repeat)
    assert sorted(path.name for path in tmp_path.glob("log_*")) == ["log_nothing_0.txt", "log_ours_expert_fc1_0.txt"]


def test_a_budget_which_nobody_plans_for_here_is_refused_before_a_process_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "start", None)  # processes start with it
    assert run(script, monkeypatch, *MODEL, "--settings", "ours:expert_fc1", "budget:1MiB") == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert error.startswith("budget:1.00MiB needs a plan, and has none here. Give a plan file")
    assert error.count("\n") == 1
