"""Tests `fgoffload bench`: errors, result files and exit codes."""

import csv
import json
from pathlib import Path

import pytest
from support.command import ARGUMENTS
from support.trainings import write_plan

from fgoffload import Action, OffloadPlan
from fgoffload.benchmark import results
from fgoffload.benchmark.measurement import Measurement, Outcome
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.cli import main
from fgoffload.trainer.steps import StepResult

REJECTED = [
    ((), "ARGUMENTS.sh is missing. Pass a Megatron argument file first, for example: fgoffload bench tiny_moe."),
    (("none.sh",), "argument file 'none.sh' does not exist. Pass a file"),
    ((ARGUMENTS, "--steps", "x"), "--steps 'x' is not a whole number. Use 1 or more."),
    ((ARGUMENTS, "--warmup", "0"), "--warmup 0 is below 1. Use 1 or more."),
    ((ARGUMENTS, "--repeats"), "--repeats expected one argument. Use --repeats N."),
    ((ARGUMENTS, "--settings", "recompute:layernorm+bogus"), "--settings 'recompute:layernorm+bogus': 'bogus' is no"),
    (
        (ARGUMENTS, "--settings", "megatron:expert_fc1+core"),
        "--settings 'megatron:expert_fc1+core': --offload-modules 'core' is not a tag",
    ),
    ((ARGUMENTS, "--settings", "plan:none.json"), "none.json: No such file or directory."),
    ((ARGUMENTS, "--budgets", "18.9PB"), "--budgets '18.9PB' is not a size."),
    ((ARGUMENTS, "--profile", "none.json", "--check-bits"), "so it cannot be combined with --profile"),
    ((ARGUMENTS, "--check-bits", "--trace"), "--check-bits does not time steps, so it cannot be combined with --trace"),
]
REJECTED_AFTER_TORCH = [
    (("--moe-router-topk", "5"), "--moe-router-topk 5 is above --num-experts 4."),
    (("--recompute-granularity", "selective"), "--recompute-granularity is controlled by the settings of a benchmark."),
    (("--search-megatron",), "--search-megatron is an unknown flag."),
    (("--repeat", "3"), "--repeat is an unknown flag. Did you mean --repeats?"),
    (("--out", "taken"), "--out 'taken' cannot be written to: File exists. Use a writable folder."),
    (("--settings", "plan:a/x.json", "plan:b/x.json"), "two settings have the name plan:x."),
]


@pytest.fixture(autouse=True)
def _working_directory_with_two_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write_plan(Path(folder, "x.json"), {(0, "layer"): Action.RECOMPUTE, (1, "expert_fc1"): Action.OFFLOAD})


def run_rejected(words, capsys):
    """Run a command that must exit with code 2 and write no files, and return its only line of output."""
    before = sorted(Path().iterdir())
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert sorted(Path().iterdir()) == before
    return err


@pytest.mark.parametrize(("words", "message"), REJECTED, ids=[" ".join(words[1:]) or "none" for words, _ in REJECTED])
def test_bad_input_exits_with_code_2_and_one_line(words, message, capsys):
    assert message in run_rejected(words, capsys)


@pytest.mark.parametrize(("words", "message"), REJECTED_AFTER_TORCH, ids=[" ".join(words) for words, _ in REJECTED_AFTER_TORCH])
def test_an_invalid_training_exits_with_code_2_and_one_line(words, message, capsys):
    assert message in run_rejected((ARGUMENTS, *words), capsys)


def test_all_plan_files_are_checked_before_the_first_measurement(capsys):
    Path("other.json").write_text(OffloadPlan(actions={}, made_for={"num_layers": 5}).to_json(), encoding="utf-8")
    err = run_rejected(
        (ARGUMENTS, "--steps", "1", "--warmup", "1", "--settings", "plan:a/x.json", "--plans", "other.json"), capsys
    )
    assert (
        "--offload-plan other.json: The plan was made for num_layers 5, but this training run has 4. Plan again for this" in err
    )


def read_rows(folder):
    with Path(folder, "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_setting_has_a_row_of_results():
    words = ["--settings", "baseline", "--plans", "a/x.json", "--num-layers", "2", "--seq-length", "32"]
    assert main(["bench", ARGUMENTS, *words, "--steps", "1", "--warmup", "1", "--repeats", "1", "--out", "results"]) == 0
    rows = read_rows("results")
    assert [(row["setting"], row["failure"]) for row in rows] == [("baseline", ""), ("plan:x", "")]
    baseline, plan = (int(row["activation_peak_bytes"]) for row in rows)
    assert 0 < plan < baseline


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_measured_profile_predicts_settings_and_plans_for_budgets(capsys):
    words = ["--settings", "recompute:full", "ours:expert_fc1", "budget:12MiB", "--plans", "a/x.json", "--profile"]
    assert main(["bench", ARGUMENTS, *words, "--steps", "1", "--warmup", "1", "--repeats", "1", "--out", "results"]) == 0
    out, _ = capsys.readouterr()
    rows = {row["setting"]: row for row in read_rows("results")}
    assert list(rows) == ["baseline", "recompute:full", "ours:expert_fc1", "budget:12.00MiB", "plan:x"]
    assert [name for name, row in rows.items() if row["failure"]] == ["budget:12.00MiB"]
    # Planned from the profile, since the hardware table does not have this device.
    assert "A memory budget of 11.98 MiB is not above the static memory" in rows["budget:12.00MiB"]["failure"]
    peaks = {name: int(row["activation_peak_bytes"] or 0) for name, row in rows.items()}
    assert 0 < peaks["recompute:full"] < peaks["plan:x"] < peaks["ours:expert_fc1"] < peaks["baseline"]
    assert {name for name, row in rows.items() if row["profile_step_s"]} == {*rows} - {"budget:12.00MiB"}
    assert "recompute:full" in out
    document = json.loads(Path("results/run.json").read_text(encoding="utf-8"))
    assert document["surroundings"]["device"] == "CPU"
    assert len(document["runs"]) == len(rows)
    found = {path.name for path in Path("results").iterdir()}
    assert found >= {"frontier.png", "results.csv", "profile.json", "log_main_0.txt"}


def replace_runs(monkeypatch, make_outcome):
    """Replace the processes of all runs: `make_outcome` returns the outcome of each run by its number."""

    def run_sessions(job, runs, *, kind, first_session, on_message):
        found = Surroundings(device="CPU", driver=None, python="3", packages={}, cuda=None, cpus=1, variables={})
        on_message(found)
        for number, run in enumerate(runs):
            yield Outcome(run=run, process=kind, session=first_session, **make_outcome(number))

    monkeypatch.setattr(results, "run_sessions", run_sessions)


def test_different_bits_exit_with_code_1(capsys, monkeypatch):
    def make_outcome(number):
        digest = "other" if number == 2 else "same"
        return {"bits": (StepResult(losses=(1.0,), gradient_digests={"0.weight": digest}, seconds=1.0),)}

    replace_runs(monkeypatch, make_outcome)
    assert main(["bench", ARGUMENTS, "--check-bits", "--settings", "recompute:full", "save_on_cpu", "--out", "bits"]) == 1
    assert "gradients from step 1, 0.weight" in capsys.readouterr().out


def test_bench_exits_with_code_1_if_all_settings_fail(capsys, monkeypatch):
    measurement = Measurement(step_seconds=(1.0,))
    replace_runs(monkeypatch, lambda number: {"failure": "rejected"} if number else {"measurement": measurement})
    assert main(["bench", ARGUMENTS, "--settings", "recompute:full", "save_on_cpu"]) == 1
    assert "save_on_cpu: rejected" in capsys.readouterr().out
    assert main(["bench", ARGUMENTS, "--settings", "baseline"]) == 0
