"""What runs in which order, and files that are whole at any time."""

import csv
import json

from fgoffload.benchmark import results as results_module
from fgoffload.benchmark.job import Ended, Job, Purpose, Ready, Stepped
from fgoffload.benchmark.measurement import Measurement, Outcome
from fgoffload.benchmark.report import Workload
from fgoffload.benchmark.results import Results, collect_results, list_runs
from fgoffload.benchmark.settings import BASELINE, ProcessKind, parse_setting
from fgoffload.benchmark.surroundings import Surroundings

FULL, CORE, MEGATRON, LAYERS = map(parse_setting, ("recompute:full", "ours:core_attn", "megatron:core_attn", "te-layers:1"))
WORKLOAD = Workload(arguments_file="x.sh", layers=1, dtype="bfloat16", tokens=10, model_flop=10, world_size=1)


def list_order(kind, **options):
    options = {"purpose": Purpose.TIMES, "repeats": 1, **options}
    return [(run.setting, run.repeat) for run in list_runs((BASELINE, FULL, MEGATRON, CORE), kind, **options)]


def test_the_baseline_begins_every_repeat_and_settings_keep_their_order():
    assert list_order(ProcessKind.MAIN) == [(BASELINE, 0), (FULL, 0), (CORE, 0)]
    assert list_order(ProcessKind.MAIN, repeats=2)[3:] == [(BASELINE, 1), (FULL, 1), (CORE, 1)]


def make_surroundings(device):
    return Surroundings(device=device, driver=None, python="3.11", packages={}, cuda=None, cpus=1, variables={})


def test_files_are_up_to_date_after_every_run_and_sessions_are_numbered_over_all_kinds(tmp_path, monkeypatch):
    seen, heard = [], []

    def run_sessions(job, runs, *, kind, first_session, log_folder, on_message):
        on_message(Ready(make_surroundings("CPU")))
        for run in runs:
            on_message(Stepped(1.0))
            on_message(Ended(run))
            measurement = Measurement(step_seconds=(0.5,))
            # Each kind of process takes two sessions.
            session = first_session + (run.setting != BASELINE)
            yield Outcome(setting=run.setting, repeat=run.repeat, session=session, measurement=measurement)
            with (tmp_path / "results.csv").open() as file:
                seen.append([row["setting"] for row in csv.DictReader(file)])

    monkeypatch.setattr(results_module, "run_sessions", run_sessions)
    results = Results(workload=WORKLOAD, about={"date": "today"})
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=tmp_path)
    collect_results(results, job, (FULL, MEGATRON), repeats=1, folder=tmp_path, on_message=heard.append)
    assert seen == [
        ["baseline"],
        ["baseline", "recompute:full"],
        ["baseline", "recompute:full", "baseline"],
        ["baseline", "recompute:full", "baseline", "megatron:core_attn"],
    ]
    assert results.processes == [ProcessKind.MAIN, ProcessKind.MAIN, ProcessKind.MEGATRON, ProcessKind.MEGATRON]
    assert [run["process"] for run in json.loads((tmp_path / "run.json").read_text())["runs"]] == [
        *("main", "main", "megatron", "megatron"),
    ]
    assert {type(message) for message in heard} == {Ready, Stepped}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "run.json"]
