"""examples/benchmarks/host_time.py: what the host takes of a step, on the CPU."""

import json
import sys

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


@pytest.mark.slow
def test_each_setting_has_its_row_and_every_step_is_written(script, monkeypatch, capsys, tmp_path):
    out = tmp_path / "host.json"
    words = ["--num-layers", "1", "--settings", "nothing", "ours:expert_fc1", "--steps", "2", "--warmup", "0", "--out"]
    assert run(script, monkeypatch, MODEL, *words, out) == 0
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
