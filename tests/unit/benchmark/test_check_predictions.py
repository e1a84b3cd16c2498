"""examples/benchmarks/check_predictions.py: command lines that the benchmark accepts, and one table of all models."""

import argparse
import json
import sys
import tarfile
import time
from pathlib import Path

import pytest
from support.scripts import load_script

from fgoffload.benchmark.forecaster import Forecaster
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.prediction import Source
from fgoffload.benchmark.settings import NOTHING, parse_setting
from fgoffload.cli import bench
from fgoffload.integrations.megatron.argument_files import read_argument_file

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    with load_script("check_predictions") as module:
        yield module


@pytest.mark.parametrize("name", ["w2_moe", "mla_moe", "llama3_8b_layers"])
def test_the_command_of_a_model_is_one_that_the_benchmark_takes(script, name, tmp_path):
    path = ROOT / "arguments" / f"{name}.sh"
    assert set(script.MODELS) == {"w2_moe", "mla_moe", "llama3_8b_layers"}
    words = script.make_command(path, tmp_path, steps=4, warmup=2)
    assert words[1:4] == ["-m", "fgoffload", "bench"]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options, flags = parser.parse_known_args(words[4:])
    checked = bench.check_options(options, flags)
    assert checked.arguments_file == path
    assert checked.measures_profile
    assert (checked.steps, checked.warmup, checked.repeats, checked.folder) == (4, 2, 1, tmp_path)
    assert len(checked.settings) + len(checked.budgets_bytes) == 6
    # Megatron knows the flags, and an H200's budgets lie where something has to be done and less than everything.
    job = Job(
        source=name,
        file_flags=tuple(read_argument_file(path, variables={})),
        typed_flags=checked.megatron_flags,
        warmup=1,
        steps=1,
        plan_folder=tmp_path,
    )
    parse_setting_arguments(job, NOTHING)
    forecaster = Forecaster(job)
    forecaster.meet("NVIDIA H200")
    peaks = {one: forecaster.predict(parse_setting(one)).predictions[Source.TABLE].peak_bytes for one in checked.settings}
    freed_bytes = peaks["nothing"] - peaks["recompute:full"]
    for part, budget_bytes in zip((0.8, 0.25), checked.budgets_bytes, strict=True):
        assert abs(peaks["nothing"] - part * freed_bytes - budget_bytes) < 0.051 * 2**30  # they are in tenths


@pytest.mark.parametrize("name", ["w2_moe", "mla_moe", "llama3_8b_layers", "another"])
def test_settings_that_need_no_plan_run_first_and_of_them_those_that_say_most(script, name, tmp_path):
    # A model's time may be over before its last setting: copies first, then a whole recompute, and what changes little last.
    words = script.make_command(ROOT / "arguments" / f"{name}.sh", tmp_path, steps=4, warmup=2)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options, _ = parser.parse_known_args(words[4:])
    assert [one.partition(":")[0] for one in options.settings] == ["nothing", "ours", "recompute", "recompute"]
    assert options.settings[2] == "recompute:full"


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(script, tmp_path):
    started = tmp_path / "started"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(started)!r}).touch()"
    parent = f"import subprocess, sys; print('out', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log.txt"
    assert script.run([sys.executable, "-c", parent], log, seconds=1.5).endswith("stopped, since its time was over")
    time.sleep(2.5)
    assert not started.exists()
    assert log.read_text() == "out\n"
    assert script.run([sys.executable, "-c", "raise SystemExit(3)"], log, seconds=60).endswith("exit code 3")


def compare(setting, source, step, peak):
    return {
        "setting": setting,
        "source": source,
        "measured_step_s": 0.5,
        "predicted_step_s": 0.5 * (1 + step / 100),
        "step_error_percent": step,
        "measured_peak_bytes": 10 * 2**30,
        "predicted_peak_bytes": round((1 + peak / 100) * 10 * 2**30),
        "peak_error_percent": peak,
    }


RUNS = {
    "one": [compare("nothing", "table", 4.0, 0.0), compare("nothing", "profile", -3.0, 0.0)],
    "other": [compare("recompute:full", "table", 6.0, -5.5)],
}


def test_what_a_model_had_measured_when_its_time_was_over_counts(script, tmp_path, monkeypatch, capsys):
    document = json.dumps({"predictions": RUNS["one"], "runs": []})
    child = f"""
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "run.json").write_text({document!r})
time.sleep(60)
"""
    monkeypatch.setattr(script, "make_command", lambda path, folder, **_: [sys.executable, "-c", child, str(folder)])
    words = ["check_predictions.py", "one.sh", "other.sh", "--out", str(tmp_path / "out"), "--minutes", "0.1"]
    monkeypatch.setattr(sys, "argv", words)
    began = time.monotonic()
    assert script.main() == 0
    # Six seconds, the same for each.
    assert time.monotonic() - began < 12
    shown = capsys.readouterr().out
    for name in ("one", "other"):
        assert f"{name}: 3 s, stopped, since its time was over, 2 comparisons" in shown


def test_all_models_are_in_one_table_the_worst_first_and_in_two_files(script, tmp_path, monkeypatch, capsys):
    def run(command, log, *, seconds):
        log.write_text("some output\n")
        folder = Path(command[command.index("--out") + 1])
        if folder.name != "broken":
            folder.mkdir()
            runs = [{"setting": "budget:1GiB", "failure": "no plan"}, {"setting": "nothing", "failure": None}]
            (folder / "run.json").write_text(json.dumps({"predictions": RUNS[folder.name], "runs": runs}))
        return "1 s, exit code 0"

    monkeypatch.setattr(script, "run", run)
    words = ["check_predictions.py", "one.sh", "other.sh", "broken.sh", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 1  # one of them left nothing
    shown = capsys.readouterr().out
    assert "other: 1 s, exit code 0, 1 comparisons" in shown
    assert "some output" in shown
    page = (tmp_path / "out" / "predictions.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| o")]
    assert rows == [
        ["other", "recompute:full", "500.0", "530.0 +6.0%", "-", "10.00 GiB", "9.45 GiB -5.5%", "-"],
        ["one", "nothing", "500.0", "520.0 +4.0%", "485.0 -3.0%", "10.00 GiB", "10.00 GiB +0.0%", "10.00 GiB +0.0%"],
    ]
    assert (
        "predicted from the hardware table, 2 comparisons, worst: step time +6.0% (other, recompute:full), within 8%; "
        "peak -5.5% (other, recompute:full), ABOVE 5%"
    ) in page
    assert "predicted from the profile, 1 comparisons, worst: step time -3.0% (one, nothing), within 4%" in page
    assert "one, budget:1GiB: no plan" in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["predictions.md", "predictions.tar.gz"]
    with tarfile.open(tmp_path / "out" / "predictions.tar.gz") as archive:
        assert {"predictions/one/run.json", "predictions/broken.txt"} <= set(archive.getnames())


def test_the_time_that_is_left_is_shared_by_the_models_that_are(script, tmp_path, monkeypatch):
    clock = [0.0]
    given = []

    def run(command, log, *, seconds):
        given.append(round(seconds))
        log.touch()
        clock[0] += 60
        return ""

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--minutes", "8"])
    script.main()
    assert given == [160, 210, 360]
