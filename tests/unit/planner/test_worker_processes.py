"""Work that several processes share: the same results in the same order, whatever becomes of a worker."""

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from support.toy_ranks import draw_rank

from fgoffload import OffloadPlan, PlanError
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import find_least_budget, solve
from fgoffload.planner.worker_processes import map_in_processes, share_work

pytestmark = [
    pytest.mark.skipif(
        sys.platform == "darwin" or multiprocessing.get_all_start_methods()[0] != "fork",
        reason="a process is copied only where that is how processes are started",
    ),
    pytest.mark.timeout(60),
]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_are_in_order_with_any_number_of_processes(processes, count):
    with share_work(processes):
        assert map_in_processes(lambda number: number * number, range(count)) == [number * number for number in range(count)]
    assert not multiprocessing.active_children()


def test_processes_share_work_only_where_that_is_allowed():
    def list_processes():
        return set(map_in_processes(lambda _: os.getpid(), range(4)))

    assert list_processes() == {os.getpid()}
    with share_work(2):
        assert len(list_processes()) == 2
        # A worker is no boss.
        assert {len(found) for found in map_in_processes(lambda _: list_processes(), range(1))} == {2}
        found = map_in_processes(lambda place: (place, list_processes()), range(2))
    assert len(found[1][1]) == 1
    assert list_processes() == {os.getpid()}


@pytest.mark.parametrize("count", [7, 700, 2000])
def test_who_is_through_takes_what_nobody_has_taken(count):
    first = os.getpid()

    def work(number):
        if os.getpid() == first:
            time.sleep(1)
        return number, os.getpid()

    with share_work(2):
        found = map_in_processes(work, range(count))
    assert [number for number, _ in found] == list(range(count))
    assert [process == first for _, process in found] == [True, *[False] * (count - 1)]


def test_the_first_thing_is_done_here():
    changed = []
    with share_work(3):
        map_in_processes(changed.append, [1, 2, 3])
    assert changed == [1]


def test_copies_may_be_nicer_than_this_process():
    with share_work(3):
        found = map_in_processes(lambda _: os.nice(0), range(3), niceness=3)
    assert found == [os.nice(0), *[min(os.nice(0) + 3, 19)] * 2]


def test_no_file_stays_open():
    with share_work(3):
        before = os.listdir("/proc/self/fd")
        map_in_processes(str, range(9))
        assert os.listdir("/proc/self/fd") == before


def test_without_files_all_is_done_here(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", refuse)
    with share_work(3):
        found = map_in_processes(lambda number: (number, os.getpid()), range(9))
    assert found == [(number, os.getpid()) for number in range(9)]


def test_what_a_worker_that_was_killed_had_to_do_is_done_here():
    first = os.getpid()

    def work(number):
        if os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with share_work(3):
        assert map_in_processes(work, range(7)) == list(range(7))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_is_raised_here_and_no_worker_stays(place):
    def work(number):
        if number == place:
            raise PlanError("This one cannot be done.")
        return number

    with share_work(2), pytest.raises(PlanError, match=r"^This one cannot be done\.$"):
        map_in_processes(work, range(4))
    assert not multiprocessing.active_children()


def test_workers_end_where_work_is_interrupted():
    first = os.getpid()

    def work(number):
        if os.getpid() == first:
            raise KeyboardInterrupt
        signal.pause()

    with share_work(3), pytest.raises(KeyboardInterrupt):
        map_in_processes(work, range(3))
    assert not multiprocessing.active_children()


def test_a_worker_ends_where_sigterm_is_ignored():
    first = os.getpid()

    def work(number):
        if os.getpid() == first:
            raise PlanError("This one cannot be done.")
        time.sleep(10)
        return number

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = time.monotonic()
    try:
        with share_work(2), pytest.raises(PlanError):
            map_in_processes(work, range(2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - start < 8
    assert not multiprocessing.active_children()


ORPHANS = """
import os, signal, sys, time
from fgoffload.planner.worker_processes import map_in_processes, share_work

first, is_last_busy = os.getpid(), sys.argv[1] == "busy"

def work(number):
    if os.getpid() == first:
        time.sleep(0.5)
        os.kill(first, signal.SIGKILL)
    if number == 2 and is_last_busy:
        os.close(1)
        time.sleep(60)
    return bytes(1_000_000)  # more than a pipe takes

with share_work(3):
    map_in_processes(work, range(3))
"""


@pytest.mark.parametrize("last", ["done", "busy"])
def test_workers_end_where_the_first_process_was_killed(last):
    """Their standard output is at its end once all of them are gone, but the busy one, which closes its own."""
    command = [sys.executable, "-c", ORPHANS, last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.communicate(timeout=15) == (b"", None)
            assert process.returncode == -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("started", [0, 1, 2])
def test_what_workers_that_cannot_be_started_had_to_do_is_done_here(monkeypatch, started):
    fork, calls = os.fork, []

    def fork_or_not():
        calls.append(None)
        if len(calls) > started:
            raise BlockingIOError("Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fork_or_not)
    with share_work(4):
        found = map_in_processes(lambda number: (number, os.getpid()), range(10))
    assert [number for number, _ in found] == list(range(10))
    assert len({process for _, process in found}) == 1 + started
    assert len(calls) == started + 1
    assert not multiprocessing.active_children()


def is_alone():
    """Return whether this process does all the work, though two may."""
    with share_work(2):
        return set(map_in_processes(lambda _: os.getpid(), range(2))) == {os.getpid()}


def test_a_daemonic_process_works_alone():
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(0 if is_alone() else 2), daemon=True)
    process.start()
    process.join(15)
    process.kill()
    process.join()
    assert process.exitcode == 0


@contextlib.contextmanager
def choose_start_method(method):
    """Choose how processes are started; with None nobody has chosen."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_where_processes_are_started_otherwise_this_one_works_alone(method):
    with choose_start_method(method):
        assert is_alone()


def test_how_processes_are_started_is_still_to_be_chosen_when_work_was_shared():
    with choose_start_method(None):
        assert not is_alone()
        assert multiprocessing.get_start_method(allow_none=True) is None


def test_on_macos_this_process_works_alone(monkeypatch):
    with choose_start_method("fork"):
        assert not is_alone()
        monkeypatch.setattr(sys, "platform", "darwin")
        assert is_alone()


def test_what_a_worker_that_was_killed_while_it_sent_had_to_do_is_done_here():
    first = os.getpid()

    def work(number):
        if os.getpid() == first:
            while multiprocessing.active_children():
                time.sleep(0.01)
        else:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        return number, os.getpid(), bytes(1_000_000)  # more than a pipe takes

    with share_work(2):
        found = map_in_processes(work, range(2))
    assert [one[:2] for one in found] == [(0, first), (1, first)]


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_the_same_with_one_process_and_with_two(seed):
    ranks = [draw_rank(seed)]
    limits = SearchLimits(exhaustive_plans=0)
    budget_bytes = (simulate(ranks, OffloadPlan(actions={})).peak_bytes + find_least_budget(ranks, limits=limits)) // 2
    alone = solve(ranks, budget_bytes=budget_bytes, limits=limits)
    with share_work(2):
        assert solve(ranks, budget_bytes=budget_bytes, limits=limits) == alone
