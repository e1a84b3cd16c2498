"""Tests the order of runs, and that result files are complete after every run."""

import csv
import json
from pathlib import Path

from fgoffload.benchmark import results as results_module
from fgoffload.benchmark.job import Job, Stepped, Workload
from fgoffload.benchmark.measurement import Measurement, Outcome
from fgoffload.benchmark.results import Results, collect_results, list_runs
from fgoffload.benchmark.settings import BASELINE, ProcessKind, parse_setting
from fgoffload.benchmark.surroundings import Surroundings

FULL, CORE, MEGATRON, LAYERS = map(parse_setting, ("recompute:full", "ours:core_attn", "megatron:core_attn", "te-layers:1"))
WORKLOAD = Workload(arguments_file="x.sh", layers=1, tokens=10, world_size=1)


def make_job(folder, **options):
    return Job(source="x.sh", file_flags=(), warmup=1, steps=1, folder=folder, **options)


def list_order(kind, **options):
    runs = list_runs((BASELINE, FULL, MEGATRON, CORE), kind, make_job(Path(), **options))
    return [(run.setting, run.repeat) for run in runs]


def test_every_repeat_starts_with_the_baseline_and_keeps_the_order_of_settings():
    assert list_order(ProcessKind.MAIN) == [(BASELINE, 0), (FULL, 0), (CORE, 0)]
    assert list_order(ProcessKind.MAIN, repeats=2)[3:] == [(BASELINE, 1), (FULL, 1), (CORE, 1)]


def make_surroundings(device):
    return Surroundings(device=device, driver=None, python="3.11", packages={}, cuda=None, cpus=1, variables={})


def test_files_are_updated_after_every_run_and_session_numbers_are_unique(tmp_path, monkeypatch):
    seen, messages = [], []

    def run_sessions(job, runs, *, kind, first_session, on_message):
        on_message(make_surroundings("CPU"))
        for run in runs:
            on_message(Stepped(1.0))
            measurement = Measurement(step_seconds=(0.5,))
            # Each kind of process takes two sessions.
            session = first_session + (run.setting != BASELINE)
            yield Outcome(run=run, process=kind, session=session, measurement=measurement)
            with (tmp_path / "results.csv").open() as file:
                seen.append([row["setting"] for row in csv.DictReader(file)])

    monkeypatch.setattr(results_module, "run_sessions", run_sessions)
    results = Results(job=make_job(tmp_path, compares_bits=False), workload=WORKLOAD, about={"date": "today"})
    collect_results(results, (FULL, MEGATRON), on_message=messages.append)
    assert seen == [
        ["baseline"],
        ["baseline", "recompute:full"],
        ["baseline", "recompute:full", "baseline"],
        ["baseline", "recompute:full", "baseline", "megatron:core_attn"],
    ]
    assert [outcome.session for outcome in results.outcomes] == [0, 1, 2, 3]
    assert [run["process"] for run in json.loads((tmp_path / "run.json").read_text())["runs"]] == [
        *("main", "main", "megatron", "megatron")
    ]
    assert {type(message) for message in messages} == {Surroundings, Stepped}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "run.json"]
