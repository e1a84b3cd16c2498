"""Sessions: what becomes of the settings after one that fails, and of processes that die or fall silent."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.trainings import MOE

from fgoffload.benchmark.job import Began, Crashed, Ended, Finished, Job, Purpose, Ready, Run
from fgoffload.benchmark.measurement import Measurement
from fgoffload.benchmark.processes import Session, plan_rest, run_sessions
from fgoffload.benchmark.results import list_runs as list_benchmark_runs
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting
from fgoffload.errors import ConfigError, OffloadError

ONE, TWO, THREE = (parse_setting(f"recompute:{name}") for name in ("full", "core_attn", "layernorm"))
MEASURED = Measurement(step_seconds=(1.0,))


def make_job(flags: str = MOE, **options) -> Job:
    options.setdefault("plan_folder", Path())
    return Job(source="test.sh", file_flags=tuple(flags.split()), warmup=1, steps=1, **options)


def run_scripted(tmp_path, runs, *, crash_at=(), crash_at_run=(), refuse=(), heard=None, purpose=Purpose.TIMES):
    """Return the outcomes of `runs`, and what each session was given.

    Sessions crash at some settings, the first at some runs too, and refuse others.
    """
    given = []

    class Scripted:
        def __init__(self, runs):
            self.runs = runs

        def listen(self):
            for index, run in enumerate(self.runs):
                yield 0, Began(run)
                if run.setting in crash_at or (len(given) == 1 and index in crash_at_run):
                    yield 0, Crashed("out of memory")
                    return
                yield 1, Ended(run)  # another rank's counts for nothing
                failure = "refused" if run.setting in refuse else ""
                yield 0, Ended(run, measurement=None if failure else MEASURED, failure=failure)
            yield 0, Finished()

    def start(job, runs, kind, log):
        given.append(list(runs))
        return contextlib.nullcontext(Scripted(runs))

    on_message = (lambda message: None) if heard is None else heard.append
    outcomes = list(
        run_sessions(
            make_job(purpose=purpose),
            runs,
            kind=ProcessKind.MAIN,
            first_session=4,
            log_folder=tmp_path,
            on_message=on_message,
            start=start,
        )
    )
    return outcomes, given


def list_runs(*settings, repeat=0):
    return [Run(setting=setting, repeat=repeat) for setting in settings]


def list_numbers(outcomes):
    return [(one.setting, one.session, one.failure) for one in outcomes]


def test_runs_that_all_end_take_one_session(tmp_path):
    heard = []
    outcomes, given = run_scripted(tmp_path, list_runs(NOTHING, ONE, TWO), refuse=[ONE], heard=heard)
    assert list_numbers(outcomes) == [(NOTHING, 4, ""), (ONE, 4, "refused"), (TWO, 4, "")]
    assert outcomes[2].measurement == MEASURED
    assert len(given) == 1
    assert [type(message) for message in heard] == [Began, Ended] * 3 + [Finished]


def test_after_a_crash_the_rest_runs_in_another_session_that_begins_with_nothing(tmp_path):
    outcomes, given = run_scripted(tmp_path, list_runs(NOTHING, ONE, TWO, THREE), crash_at=[ONE])
    assert list_numbers(outcomes) == [
        (NOTHING, 4, ""),
        (ONE, 4, "out of memory"),
        (NOTHING, 5, ""),
        (TWO, 5, ""),
        (THREE, 5, ""),
    ]
    assert [run.setting for run in given[1]] == [NOTHING, TWO, THREE]


def test_a_setting_that_crashed_is_not_tried_again_in_later_repeats(tmp_path):
    runs = [*list_runs(NOTHING, ONE, TWO), *list_runs(NOTHING, ONE, TWO, repeat=1)]
    outcomes, given = run_scripted(tmp_path, runs, crash_at=[TWO])
    assert [(run.setting, run.repeat) for run in given[1]] == [(NOTHING, 1), (ONE, 1)]
    assert [one.setting for one in outcomes] == [NOTHING, ONE, TWO, NOTHING, ONE]


def test_where_nothing_itself_crashes_the_rest_is_not_measured_and_says_why(tmp_path):
    outcomes, given = run_scripted(tmp_path, list_runs(NOTHING, ONE, TWO), crash_at=[NOTHING])
    assert len(given) == 1
    reason = "not measured, since nothing failed: out of memory"
    assert list_numbers(outcomes) == [(NOTHING, 4, "out of memory"), (ONE, 4, reason), (TWO, 4, reason)]


def test_where_a_later_nothing_crashes_the_rest_runs_in_another_session(tmp_path):
    runs = list_runs(NOTHING, ONE, NOTHING, TWO, NOTHING)
    outcomes, given = run_scripted(tmp_path, runs, crash_at_run=[2])
    assert list_numbers(outcomes) == [
        (NOTHING, 4, ""),
        (ONE, 4, ""),
        (NOTHING, 4, "out of memory"),
        (NOTHING, 5, ""),
        (TWO, 5, ""),
        (NOTHING, 5, ""),
    ]
    assert [run.setting for run in given[1]] == [NOTHING, TWO, NOTHING]


def test_a_crash_behind_which_only_nothing_is_left_ends_it(tmp_path):
    outcomes, given = run_scripted(tmp_path, list_runs(NOTHING, ONE, NOTHING), crash_at=[ONE])
    assert len(given) == 1
    assert list_numbers(outcomes) == [(NOTHING, 4, ""), (ONE, 4, "out of memory")]


def test_where_bits_are_compared_each_session_begins_with_nothing_twice(tmp_path):
    runs = list_benchmark_runs((ONE, TWO, THREE), ProcessKind.MAIN, purpose=Purpose.BITS, repeats=1)
    assert list(runs) == list_runs(NOTHING, NOTHING, ONE, TWO, THREE)
    assert plan_rest(runs[2], runs[3:], purpose=Purpose.BITS) == list_runs(NOTHING, NOTHING, TWO, THREE)
    assert plan_rest(runs[1], runs[2:], purpose=Purpose.BITS) == list_runs(NOTHING, NOTHING, ONE, TWO, THREE)
    assert plan_rest(runs[4], [], purpose=Purpose.BITS) == []
    _, given = run_scripted(tmp_path, runs, crash_at=[TWO], purpose=Purpose.BITS)
    assert given[1] == list_runs(NOTHING, NOTHING, THREE)


def test_a_crash_of_the_last_setting_ends_it(tmp_path):
    outcomes, given = run_scripted(tmp_path, list_runs(NOTHING, ONE), crash_at=[ONE])
    assert len(given) == 1
    assert list_numbers(outcomes) == [(NOTHING, 4, ""), (ONE, 4, "out of memory")]


def test_nothing_is_not_put_before_a_repeat_that_begins_with_it():
    rest = list_runs(NOTHING, ONE, repeat=1)
    assert plan_rest(list_runs(TWO)[0], rest) == rest
    assert plan_rest(list_runs(TWO)[0], []) == []


# Real processes.


def test_a_process_that_is_killed_is_a_crash_with_its_exit_code(tmp_path):
    log = tmp_path / "log.txt"
    with Session(make_job(), list_runs(NOTHING), ProcessKind.MAIN, log) as session:
        process = session._processes[0]
        os.kill(process.pid, signal.SIGKILL)
        assert list(session.listen()) == [(0, Crashed(f"rank 0 ended with exit code -9; see {log}"))]


def test_a_process_that_says_nothing_is_given_up_and_ended(tmp_path):
    with Session(make_job(), list_runs(NOTHING), ProcessKind.MAIN, tmp_path / "log.txt") as session:
        pid = session._processes[0].pid
        assert list(session.listen(silence_seconds=0.01)) == [(0, Crashed("nothing was heard of it for 0 s"))]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_leaving_a_session_on_an_exception_ends_its_processes(tmp_path):
    pids = []

    def interrupt():
        with Session(make_job(), list_runs(NOTHING), ProcessKind.MAIN, tmp_path / "log") as session:
            pids.append(session._processes[0].pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.timeout(300)  # each loads torch and Megatron-Core anew
def test_a_training_that_is_refused_before_it_begins_is_a_crash_in_one_line(tmp_path):
    job = make_job(f"{MOE} --moe-router-topk 9")
    outcomes = list(run_sessions(job, list_runs(NOTHING, ONE), kind=ProcessKind.MAIN, first_session=0, log_folder=tmp_path))
    assert [one.failure for one in outcomes] == [
        "test.sh: --moe-router-topk 9 is above --num-experts 4. Give --moe-router-topk 4 or less, or more experts.",
        f"not measured, since nothing failed: {outcomes[0].failure}",
    ]
    assert "ConfigError" in (tmp_path / "log_main_0.txt").read_text()


@pytest.mark.timeout(300)
def test_a_setting_that_is_refused_leaves_its_process_to_the_others(tmp_path):
    heard = []
    refused = parse_setting("megatron:core_attn")
    outcomes = list(
        run_sessions(
            make_job(),
            list_runs(NOTHING, refused, ONE),
            kind=ProcessKind.MEGATRON,
            first_session=0,
            log_folder=tmp_path,
            on_message=heard.append,
        )
    )
    assert [(one.setting, one.session) for one in outcomes] == [(NOTHING, 0), (refused, 0), (ONE, 0)]
    assert outcomes[1].failure == "Megatron-Core's own offload engine needs a GPU, and there is none. Run it on one."
    assert len(outcomes[0].measurement.step_seconds) == len(outcomes[2].measurement.step_seconds) == 1
    ready = [message for message in heard if isinstance(message, Ready)]
    assert ready[0].surroundings.device == "CPU"
    # The switch of its kind of process was set before anything was imported there.
    assert ready[0].surroundings.variables["NVTE_CPU_OFFLOAD_V1"] == "1"


def test_errors_are_described_in_one_short_line():
    from fgoffload.benchmark.worker import LONGEST_REASON, describe_error

    assert describe_error(ConfigError("first\n  second")) == "first second"
    assert describe_error(ValueError("a\nb")) == "ValueError: a b"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(describe_error(OffloadError("x" * 5000))) == LONGEST_REASON + 3
