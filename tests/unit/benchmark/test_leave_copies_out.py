"""examples/benchmarks/leave_copies_out.py: steps with copies left out, on the CPU."""

import json
import sys

import pytest
from support.scripts import BENCHMARKS, load_script

from fgoffload.engine import CpuDevice
from fgoffload.integrations.megatron.training import Trainer

MODEL = BENCHMARKS.parents[1] / "arguments" / "tiny_moe.sh"
KINDS = ["all copies", "without those to the host", "without any copy", "nothing leaves"]


@pytest.fixture(scope="module")
def script():
    with load_script("leave_copies_out") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    monkeypatch.setattr(sys, "argv", ["leave_copies_out.py", *map(str, words)])
    return script.main()


@pytest.mark.slow
def test_each_kind_of_step_has_the_copies_that_its_name_says(script, monkeypatch, capsys, tmp_path):
    copied, steps = [], []
    copy_bytes = CpuDevice.copy_bytes

    def count(device, *, destination, source, stream):
        copied.append("out" if stream is device.d2h_stream else "back")
        copy_bytes(device, destination=destination, source=source, stream=stream)

    monkeypatch.setattr(CpuDevice, "copy_bytes", count)
    run_step = Trainer.run_step

    def run_counted(trainer, **options):
        copied.clear()
        result = run_step(trainer, **options)
        steps.append((copied.count("out"), copied.count("back")))
        return result

    monkeypatch.setattr(Trainer, "run_step", run_counted)
    out = tmp_path / "steps.json"
    words = (MODEL, "--num-layers", "1", "--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--out", out)
    assert run(script, monkeypatch, *words) == 0
    (first, none_out, none, stays), second = steps[:4], steps[4:8]
    assert first[0] == first[1] > 0
    assert none_out == (0, first[1])
    assert none == stays == (0, 0)
    assert second == [stays, none, none_out, first]  # every other round goes backwards
    document = json.loads(out.read_text(encoding="utf-8"))
    assert list(document["ours:expert_fc1"]) == KINDS
    assert {len(seconds) for seconds in document["ours:expert_fc1"].values()} == {3}
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)
    assert "ours:expert_fc1" in shown
