"""Runs the scripts of `examples/benchmarks` on the CPU and checks their rows."""

import argparse
import json
import sys

import pytest
from support.scripts import BENCHMARKS, load_script

from fgoffload.cli import bench
from fgoffload.engine import CpuDevice
from fgoffload.trainer.trainer import Trainer
from fgoffload.units import MIB

ARGUMENTS = BENCHMARKS.parents[1] / "arguments"
MODEL = (ARGUMENTS / "tiny_moe.sh", "--num-layers", "1")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a script and returns its exit code, the first cell of each row, and stderr."""

    def run_script(name, *words, **replaced):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # undone after the test, unlike the script's own change
        # Spawned processes import the script by its module name.
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        with load_script(name) as script:
            for attribute, value in replaced.items():
                monkeypatch.setattr(script, attribute, value)
            code = script.main()
        shown = capsys.readouterr()
        return code, [line.split("│")[1].strip() for line in shown.out.splitlines() if line.startswith("│")], shown.err

    return run_script


def test_host_time_prints_one_row_per_setting(run, tmp_path):
    words = ("--settings", "baseline", "ours:expert_fc1", "--steps", "2", "--warmup", "0", "--out", tmp_path / "host.json")
    assert run("host_time", *MODEL, *words)[:2] == (0, ["baseline", "ours:expert_fc1"])
    for steps in json.loads((tmp_path / "host.json").read_text()).values():
        assert all(0 < step["forward_s"] + step["backward_s"] < step["step_s"] for step in steps)


def test_leave_copies_out_runs_each_kind_of_step_with_its_copies(run, monkeypatch, tmp_path):
    copied, steps = [], []
    copy_bytes, run_step = CpuDevice.copy_bytes, Trainer.run_step

    def count(device, *, destination, source, stream):
        copied.append("d2h" if stream is device.d2h_stream else "h2d")
        copy_bytes(device, destination=destination, source=source, stream=stream)

    def run_counted(trainer, **options):
        copied.clear()
        result = run_step(trainer, **options)
        steps.append((copied.count("d2h"), copied.count("h2d")))
        return result

    monkeypatch.setattr(CpuDevice, "copy_bytes", count)
    monkeypatch.setattr(Trainer, "run_step", run_counted)
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--out", tmp_path / "steps.json")
    assert run("leave_copies_out", *MODEL, *words)[0] == 0
    (both, only_h2d, none, kept), second = steps[:4], steps[4:8]
    assert both[0] == both[1] > 0
    assert (only_h2d, none, kept) == ((0, both[1]), (0, 0), (0, 0))
    assert second == [kept, none, only_h2d, both]  # every other round is reversed


def test_measure_waits_writes_one_row_and_one_trace_per_setting(run, tmp_path):
    words = ("--steps", "1", "--warmup", "1", "--repeats", "1", "--out", tmp_path, "--trace", tmp_path / "traces")
    assert run("measure_waits", *MODEL, *words)[:2] == (0, ["no offload", "before", "after"])
    d2h_bytes = {one["remedies"]: one["d2h_bytes"] for one in json.loads((tmp_path / "waits.json").read_text())["runs"]}
    assert d2h_bytes["no offload"] == 0 < d2h_bytes["before"] == d2h_bytes["after"]
    with load_script("idle_time") as idle_time, load_script("trace_events") as trace_events:
        for path in (tmp_path / "traces").iterdir():  # one wait in each layer and microbatch
            events = trace_events.read_events(path)
            assert sum(event["name"] == idle_time.WAIT_RANGE for event in events) == 4


def test_copies_beside_host_prints_one_row_per_direction(run):
    replaced = {"COPY_BYTES": MIB, "find_device": lambda kind: CpuDevice()}
    code, rows, _ = run("copies_beside_host", "--seconds", "0.001", "--repeats", "2", **replaced)
    assert (code, rows) == (0, ["none", "to the host", "to the device", "both directions"])
    assert "needs a GPU" in run("copies_beside_host")[2]


@pytest.mark.slow
def test_take_turns_prints_one_row_per_process(run, tmp_path):
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--repeats", "1", "--out", tmp_path)
    assert run("take_turns", *MODEL, *words)[:2] == (0, ["baseline", "ours:expert_fc1"])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")  # older versions have no other function
def test_hugging_face_writes_one_bitwise_identical_row_per_setting(run, tmp_path):
    words = ("--smoke", "--layers", "2", "--steps", "1", "--warmup", "1", "--settings", "baseline", "checkpointing", "offload")
    assert run("hugging_face", *words, "--budgets", "1KiB", "1GiB", "--out", tmp_path / "rows.json")[0] == 1
    rows = {row["setting"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert "BudgetError" in rows.pop("budget 1KiB")["error"]  # and the next budget runs
    assert list(rows) == ["baseline", "checkpointing", "offload", "budget 1GiB"]
    assert all(row["is_bitwise_identical"] for row in rows.values())
    assert rows["budget 1GiB"]["predicted_peak_gib"] > 0


def test_take_turns_rejects_budgets_before_it_starts_processes(run):
    code, _, error = run("take_turns", *MODEL, "--settings", "ours:expert_fc1", "budget:1MiB", start=None)
    assert code == 2
    assert error.startswith("budget:1.00MiB needs a plan. Pass a plan file")


def test_check_predictions_makes_a_valid_bench_command(tmp_path):
    path = ARGUMENTS / "w2_moe.sh"
    with load_script("check_predictions") as script:
        words = script.make_command(path, tmp_path, steps=4, warmup=2)
    assert words[1:4] == ["-m", "fgoffload", "bench"]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options, flags = parser.parse_known_args(words[4:], argparse.Namespace(own_flags=[]))
    job = bench.check_options(options, flags)
    assert (job.source, job.measures_profile, job.folder) == (str(path), True, tmp_path)
    assert len(options.settings) + len(options.budgets) == 6
