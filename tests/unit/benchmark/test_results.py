"""What runs in which order, and files that are whole at any time."""

import csv
import json

import pytest

from fgoffload.benchmark import results as results_module
from fgoffload.benchmark.job import Ended, Job, Purpose, Ready, Run, Stepped
from fgoffload.benchmark.measurement import Measurement, Outcome
from fgoffload.benchmark.prediction import Forecast, Prediction, Source
from fgoffload.benchmark.report import Workload
from fgoffload.benchmark.results import Results, collect_results, list_runs
from fgoffload.benchmark.settings import NOTHING, PROFILE, ProcessKind, parse_setting
from fgoffload.benchmark.surroundings import Surroundings

FULL, CORE, MEGATRON, LAYERS = map(parse_setting, ("recompute:full", "ours:core_attn", "megatron:core_attn", "te-layers:1"))
WORKLOAD = Workload(arguments_file="x.sh", layers=1, dtype="bfloat16", tokens=10, model_flop=10, world_size=1)


def list_order(kind, **options):
    options = {"purpose": Purpose.TIMES, "repeats": 1, **options}
    return [(run.setting, run.repeat) for run in list_runs((NOTHING, FULL, MEGATRON, CORE), kind, **options)]


def test_nothing_begins_every_repeat_and_settings_keep_their_order():
    assert list_order(ProcessKind.MAIN) == [(NOTHING, 0), (FULL, 0), (CORE, 0)]
    assert list_order(ProcessKind.MAIN, repeats=2)[3:] == [(NOTHING, 1), (FULL, 1), (CORE, 1)]


def test_nothing_comes_again_behind_some_settings_and_at_the_end_of_each_repeat():
    order = list_order(ProcessKind.MAIN, repeats=2, nothing_every=1)
    assert order[:5] == [(NOTHING, 0), (FULL, 0), (NOTHING, 0), (CORE, 0), (NOTHING, 0)]
    assert order[5:] == [(setting, 1) for setting, _ in order[:5]]
    assert list_order(ProcessKind.MAIN, nothing_every=2) == [(NOTHING, 0), (FULL, 0), (CORE, 0), (NOTHING, 0)]
    assert list_order(ProcessKind.MAIN, nothing_every=9) == list_order(ProcessKind.MAIN, nothing_every=2)
    assert list_order(ProcessKind.LAYERS, nothing_every=1) == []
    assert [run.setting for run in list_runs((), ProcessKind.MAIN, purpose=Purpose.TIMES, repeats=1, nothing_every=1)] == [
        NOTHING
    ]


def test_a_kind_of_process_without_settings_is_not_started():
    assert list_order(ProcessKind.MEGATRON) == [(NOTHING, 0), (MEGATRON, 0)]
    assert list_order(ProcessKind.LAYERS) == []
    assert [run.setting for run in list_runs((), ProcessKind.MAIN, purpose=Purpose.TIMES, repeats=1)] == [NOTHING]


def test_where_bits_are_compared_nothing_comes_twice_and_all_else_once():
    runs = list_order(ProcessKind.MAIN, purpose=Purpose.BITS, repeats=3)
    assert runs == [(NOTHING, 0), (NOTHING, 0), (FULL, 0), (CORE, 0)]


def test_a_profile_is_measured_once_however_often_the_list_runs():
    settings = (NOTHING, PROFILE, FULL)
    runs = list_runs(settings, ProcessKind.MAIN, purpose=Purpose.TIMES, repeats=2)
    assert [run.setting for run in runs] == [NOTHING, PROFILE, FULL, NOTHING, FULL]


def make_surroundings(device):
    return Surroundings(device=device, driver=None, python="3.11", packages={}, cuda=None, cpus=1, variables={})


@pytest.mark.parametrize(
    ("device", "dtype", "rate"),
    [("NVIDIA H200", "bfloat16", 989.4e12), ("NVIDIA H200", "float32", None), ("CPU", "bfloat16", None)],
)
def test_the_rate_of_the_device_is_that_of_the_models_type(device, dtype, rate):
    workload = Workload(arguments_file="x.sh", layers=1, dtype=dtype, tokens=10, model_flop=10, world_size=1)
    results = Results(workload=workload, about={})
    results.meet(make_surroundings(device))
    assert results.workload.device_flop_per_s == rate


def test_files_are_up_to_date_after_every_run_and_sessions_are_numbered_over_all_kinds(tmp_path, monkeypatch):
    seen, heard = [], []

    def run_sessions(job, runs, *, kind, first_session, log_folder, on_message):
        on_message(Ready(make_surroundings("CPU")))
        for run in runs:
            on_message(Stepped(1.0))
            on_message(Ended(run))
            measurement = Measurement(step_seconds=(0.5,))
            # Each kind of process takes two sessions.
            session = first_session + (run.setting != NOTHING)
            yield Outcome(setting=run.setting, repeat=run.repeat, session=session, measurement=measurement)
            with (tmp_path / "results.csv").open() as file:
                seen.append([row["setting"] for row in csv.DictReader(file)])

    monkeypatch.setattr(results_module, "run_sessions", run_sessions)
    results = Results(workload=WORKLOAD, about={"date": "today"})
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=tmp_path)
    collect_results(results, job, (FULL, MEGATRON), repeats=1, folder=tmp_path, on_message=heard.append)
    assert seen == [
        ["nothing"],
        ["nothing", "recompute:full"],
        ["nothing", "recompute:full", "nothing"],
        ["nothing", "recompute:full", "nothing", "megatron:core_attn"],
    ]
    assert results.processes == [ProcessKind.MAIN, ProcessKind.MAIN, ProcessKind.MEGATRON, ProcessKind.MEGATRON]
    assert [run["process"] for run in json.loads((tmp_path / "run.json").read_text())["runs"]] == [
        *("main", "main", "megatron", "megatron"),
    ]
    assert {type(message) for message in heard} == {Ready, Stepped}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "run.json"]


def test_a_setting_that_crashes_has_missed_all_repeats_that_it_did_not_come_to(tmp_path, monkeypatch):
    def run_sessions(job, runs, *, kind, first_session, log_folder, on_message):
        if kind is ProcessKind.MAIN:
            yield from list_outcomes((NOTHING, 0, (1.0,)), (FULL, 0, (2.0,)))
            yield Outcome(setting=FULL, repeat=1, session=0, failure="out of memory")

    monkeypatch.setattr(results_module, "run_sessions", run_sessions)
    results = Results(workload=WORKLOAD, about={})
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=tmp_path)
    collect_results(results, job, (FULL,), repeats=4, folder=tmp_path, on_message=lambda _: None)
    _, full = results.summarize()
    assert (full.repeats, full.missed_repeats, full.failure) == (4, 3, "out of memory")


def test_a_run_has_a_setting_and_a_repeat():
    assert Run(setting=LAYERS, repeat=0) != Run(setting=LAYERS, repeat=1)


class Prophet:
    """Predicts what it is told, and notes what it is asked for."""

    def __init__(self):
        self.asked = []
        self.has_profile = False

    def meet(self, device):
        self.asked.append(device)

    def read_profile(self):
        self.has_profile = True

    def renew_plain_step(self, seconds):
        self.asked.append(seconds)

    def predict(self, setting):
        self.asked.append(setting.name)
        prediction = Prediction(step_s=0.6, ratio=1.2, peak_bytes=9, static_bytes=3)
        sources = [Source.TABLE, Source.PROFILE] if self.has_profile else [Source.TABLE]
        return Forecast(predictions=dict.fromkeys(sources, prediction))


def test_what_was_measured_before_the_profile_is_predicted_from_it_too_and_failures_are_not(tmp_path):
    results = Results(workload=WORKLOAD, about={}, forecaster=Prophet())
    results.meet(make_surroundings("CPU"))
    measurement = Measurement(step_seconds=(0.5,), peak_allocated_bytes=10)
    for setting in (NOTHING, PROFILE, FULL, FULL):
        results.add(Outcome(setting=setting, repeat=0, session=0, measurement=measurement), ProcessKind.MAIN)
    results.add(Outcome(setting=CORE, repeat=0, session=0, failure="refused"), ProcessKind.MAIN)
    assert results.forecaster.asked == ["CPU", "nothing", "nothing", "recompute:full"]
    assert {setting: set(one.predictions) for setting, one in results.forecasts.items()} == {
        NOTHING: set(Source),
        FULL: set(Source),
    }
    results.write(tmp_path)
    rows = json.loads((tmp_path / "run.json").read_text())["predictions"]
    assert [(row["setting"], row["source"]) for row in rows] == [
        *(("nothing", "table"), ("recompute:full", "table")),
        *(("nothing", "profile"), ("recompute:full", "profile")),
    ]
    assert rows[0]["step_error_percent"] == 20.0
    assert rows[0]["peak_error_percent"] == -10.0
    with (tmp_path / "results.csv").open() as file:
        assert [row["profile_step_s"] for row in csv.DictReader(file)] == ["0.6", "", "0.6", "0.6", ""]


def list_outcomes(*steps):
    """Return outcomes of settings, sessions and what each of their steps took."""
    return [
        Outcome(setting=setting, repeat=0, session=session, measurement=Measurement(step_seconds=seconds))
        for setting, session, seconds in steps
    ]


def renew(outcomes, *, tmp_path, monkeypatch, has_forecaster=True):
    """Return what a forecaster is asked for when all of `outcomes` have been measured, the second session being Megatron's."""

    def run_sessions(job, runs, *, kind, first_session, log_folder, on_message):
        yield from (one for one in outcomes if kind is (ProcessKind.MEGATRON if one.session else ProcessKind.MAIN))

    monkeypatch.setattr(results_module, "run_sessions", run_sessions)
    results = Results(workload=WORKLOAD, about={}, forecaster=Prophet() if has_forecaster else None)
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=tmp_path)
    collect_results(results, job, (FULL, MEGATRON), repeats=1, folder=tmp_path, on_message=lambda _: None)
    return results.forecaster and results.forecaster.asked


def test_a_profile_that_was_measured_gets_the_plain_step_of_all_of_its_processes_nothing(tmp_path, monkeypatch):
    main = [(NOTHING, 0, (1.0, 2.0)), (PROFILE, 0, (9.0,)), (FULL, 0, (8.0,)), (NOTHING, 0, (4.0,))]
    outcomes = list_outcomes(*main, (NOTHING, 1, (7.0, 7.0, 7.0)))
    asked = renew(outcomes, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert asked == ["nothing", "nothing", "recompute:full", 2.0, "nothing", "recompute:full"]


def test_without_a_profile_of_its_own_a_benchmark_predicts_once(tmp_path, monkeypatch):
    outcomes = list_outcomes((NOTHING, 0, (1.0,)), (FULL, 0, (8.0,)))
    assert renew(outcomes, tmp_path=tmp_path, monkeypatch=monkeypatch) == ["nothing", "recompute:full"]
    failed = [*outcomes, Outcome(setting=PROFILE, repeat=0, session=0, failure="refused")]
    assert renew(failed, tmp_path=tmp_path, monkeypatch=monkeypatch) == ["nothing", "recompute:full"]
    assert renew(outcomes, tmp_path=tmp_path, monkeypatch=monkeypatch, has_forecaster=False) is None


def test_a_profile_without_any_nothing_keeps_its_plain_step(tmp_path, monkeypatch):
    outcomes = [Outcome(setting=NOTHING, repeat=0, session=0, failure="refused"), *list_outcomes((PROFILE, 0, (9.0,)))]
    assert renew(outcomes, tmp_path=tmp_path, monkeypatch=monkeypatch) == []
