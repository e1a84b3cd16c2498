"""Runs the scripts of `examples/benchmarks` on the CPU, and checks for a row per measurement."""

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
    """Returns a function that runs a script and returns its exit code, the first cell of each row, and stderr."""

    def run_it(name, *words, **replaced):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
        # A process that is spawned finds the functions of this one by the name of their module.
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        with load_script(name) as script:
            for attribute, value in replaced.items():
                monkeypatch.setattr(script, attribute, value)
            code = script.main()
        shown = capsys.readouterr()
        return code, [line.split("│")[1].strip() for line in shown.out.splitlines() if line.startswith("│")], shown.err

    return run_it


def test_the_time_of_the_host_has_a_row_for_each_setting(run, tmp_path):
    words = ("--settings", "baseline", "ours:expert_fc1", "--steps", "2", "--warmup", "0", "--out", tmp_path / "host.json")
    assert run("host_time", *MODEL, *words)[:2] == (0, ["baseline", "ours:expert_fc1"])
    for steps in json.loads((tmp_path / "host.json").read_text()).values():
        assert all(0 < step["forward_s"] + step["backward_s"] < step["step_s"] for step in steps)


def test_each_kind_of_step_has_the_copies_that_its_name_says(run, monkeypatch, tmp_path):
    copied, steps = [], []
    copy_bytes, run_step = CpuDevice.copy_bytes, Trainer.run_step

    def count(device, *, destination, source, stream):
        copied.append("out" if stream is device.d2h_stream else "back")
        copy_bytes(device, destination=destination, source=source, stream=stream)

    def run_counted(trainer, **options):
        copied.clear()
        result = run_step(trainer, **options)
        steps.append((copied.count("out"), copied.count("back")))
        return result

    monkeypatch.setattr(CpuDevice, "copy_bytes", count)
    monkeypatch.setattr(Trainer, "run_step", run_counted)
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--out", tmp_path / "steps.json")
    assert run("leave_copies_out", *MODEL, *words)[0] == 0
    (first, none_out, none, stays), second = steps[:4], steps[4:8]
    assert first[0] == first[1] > 0
    assert (none_out, none, stays) == ((0, first[1]), (0, 0), (0, 0))
    assert second == [stays, none, none_out, first]  # every other round goes backwards


def test_the_cost_of_waits_has_a_row_and_a_trace_for_each_setting(run, tmp_path):
    words = ("--steps", "1", "--warmup", "1", "--repeats", "1", "--out", tmp_path, "--trace", tmp_path / "traces")
    assert run("measure_waits", *MODEL, *words)[:2] == (0, ["no offload", "before", "after"])
    moved = {one["remedies"]: one["d2h_bytes"] for one in json.loads((tmp_path / "waits.json").read_text())["runs"]}
    assert moved["no offload"] == 0 < moved["before"] == moved["after"]
    with load_script("idle_time") as idle_time, load_script("trace_events") as trace_events:
        for path in (tmp_path / "traces").iterdir():  # one wait in each layer and microbatch
            events = trace_events.read_events(path)
            assert sum(event["name"] == idle_time.WAIT_RANGE for event in events) == 4


def test_the_work_of_the_host_beside_copies_has_a_row_for_each_direction(run):
    replaced = {"COPY_BYTES": MIB, "find_device": lambda kind: CpuDevice()}
    code, rows, _ = run("copies_beside_host", "--seconds", "0.001", "--repeats", "2", **replaced)
    assert (code, rows) == (0, ["none", "to the host", "to the device", "both ways"])
    assert "needs a GPU" in run("copies_beside_host")[2]


@pytest.mark.slow
def test_processes_that_take_turns_have_a_row_each(run, tmp_path):
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--repeats", "1", "--out", tmp_path)
    assert run("take_turns", *MODEL, *words)[:2] == (0, ["baseline", "ours:expert_fc1"])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")  # older versions have no other name
def test_hugging_face_models_have_a_row_for_each_setting_with_the_bits_of_the_first(run, tmp_path):
    words = ("--smoke", "--layers", "2", "--steps", "1", "--warmup", "1", "--settings", "baseline", "checkpointing", "offload")
    assert run("hugging_face", *words, "--budgets", "1KiB", "1GiB", "--out", tmp_path / "rows.json")[0] == 1
    rows = {row["setting"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert "BudgetError" in rows.pop("budget 1KiB")["error"]  # and the next one runs
    assert list(rows) == ["baseline", "checkpointing", "offload", "budget 1GiB"]
    assert all(row["is_bitwise_identical"] for row in rows.values())
    assert rows["budget 1GiB"]["predicted_peak_gib"] > 0


def test_a_budget_which_nobody_plans_for_is_refused_before_a_process_starts(run):
    code, _, error = run("take_turns", *MODEL, "--settings", "ours:expert_fc1", "budget:1MiB", start=None)
    assert code == 2
    assert error.startswith("budget:1.00MiB needs a plan. Pass a plan file")


def test_predictions_are_checked_by_a_command_that_the_benchmark_takes(tmp_path):
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
