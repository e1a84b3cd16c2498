"""Work that several processes share: the same results in the same order, whatever becomes of a worker."""

import multiprocessing
import os
import signal

import pytest
from support.toy_ranks import draw_rank

from fgoffload import OffloadPlan, PlanError
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.search import SearchLimits
from fgoffload.planner.solving.solver import find_least_budget, solve
from fgoffload.planner.worker_processes import map_in_processes, share_work

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="copies of a process need fork")


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


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_the_same_with_one_process_and_with_two(seed):
    ranks = [draw_rank(seed)]
    limits = SearchLimits(exhaustive_plans=0)
    budget_bytes = (simulate(ranks, OffloadPlan(actions={})).peak_bytes + find_least_budget(ranks, limits=limits)) // 2
    alone = solve(ranks, budget_bytes=budget_bytes, limits=limits)
    with share_work(2):
        assert solve(ranks, budget_bytes=budget_bytes, limits=limits) == alone
