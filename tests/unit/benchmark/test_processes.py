"""Tests sessions of benchmark processes: failed settings, crashes and interrupts."""

import contextlib
import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest
from support.trainings import MOE

from fgoffload.benchmark.job import Crashed, Job
from fgoffload.benchmark.measurement import Measurement, Outcome, Run
from fgoffload.benchmark.processes import run_sessions, start_session
from fgoffload.benchmark.settings import BASELINE, ProcessKind, parse_setting

ONE, TWO, THREE = (parse_setting(f"recompute:{name}") for name in ("full", "core_attn", "layernorm"))
MEASURED = Measurement(step_seconds=(1.0,))


def make_job(flags: str = MOE, **options) -> Job:
    options.setdefault("folder", Path())
    return Job(source="test.sh", file_flags=tuple(flags.split()), warmup=1, steps=1, **options)


def run_scripted(runs, *, crash_at=(), reject=(), messages=None):
    """Return the outcomes of `runs`, and the runs of each session.

    Sessions crash at the settings `crash_at` and reject the settings `reject`.
    """
    session_runs = []

    def listen(runs, session):
        for run in runs:
            yield 0, run
            if run.setting in crash_at:
                yield 0, Crashed("out of memory")
                return
            outcome = Outcome(run=run, process=ProcessKind.MAIN, session=session)
            yield 1, outcome  # outcomes of other ranks are ignored
            failure = "rejected" if run.setting in reject else ""
            yield 0, dataclasses.replace(outcome, measurement=None if failure else MEASURED, failure=failure)

    def start(job, runs, kind, session):
        session_runs.append(list(runs))
        return contextlib.nullcontext(listen(runs, session))

    on_message = (lambda message: None) if messages is None else messages.append
    sessions = run_sessions(make_job(), runs, kind=ProcessKind.MAIN, first_session=4, on_message=on_message, start=start)
    outcomes = list(sessions)
    return outcomes, session_runs


def list_runs(*settings, repeat=0):
    return [Run(setting=setting, repeat=repeat) for setting in settings]


def list_results(outcomes):
    return [(one.setting, one.session, one.failure) for one in outcomes]


def test_runs_without_a_crash_share_one_session():
    messages = []
    outcomes, session_runs = run_scripted(list_runs(BASELINE, ONE, TWO), reject=[ONE], messages=messages)
    assert list_results(outcomes) == [(BASELINE, 4, ""), (ONE, 4, "rejected"), (TWO, 4, "")]
    assert outcomes[2].measurement == MEASURED
    assert len(session_runs) == 1
    assert [type(message) for message in messages] == [Run, Outcome] * 3


def test_a_crash_starts_another_session_that_begins_with_the_baseline():
    outcomes, session_runs = run_scripted(list_runs(BASELINE, ONE, TWO, THREE), crash_at=[ONE])
    assert list_results(outcomes) == [
        (BASELINE, 4, ""),
        (ONE, 4, "out of memory"),
        (BASELINE, 5, ""),
        (TWO, 5, ""),
        (THREE, 5, ""),
    ]
    assert [run.setting for run in session_runs[1]] == [BASELINE, TWO, THREE]


def test_an_exception_inside_a_session_ends_its_processes(tmp_path):
    pids = []

    def interrupt():
        with start_session(make_job(folder=tmp_path), list_runs(BASELINE), ProcessKind.MAIN, 0):
            pids.extend(process.pid for process in multiprocessing.active_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[-1], 0)
