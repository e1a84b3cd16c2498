"""Tests that streams and events order all accesses to the same bytes, and that no wait in the engine is redundant.

The recording device records each read and write of each kernel, copy, allocation and free. `support/recording.py` defines
which accesses are ordered; the schedules are in `support/schedules.py` and `support/stream_schedules.py`.
"""

import ast
import collections
import functools
import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support import graph_schedules, schedules, stream_schedules
from support.random_streams import make_sees_done, run_setup, setups
from support.recording import leaves_out_hazard, leaves_out_site
from support.streams import record

import fgoffload.engine
from fgoffload.engine import Hazard

pytestmark = pytest.mark.quick

SCHEDULES = schedules.SINGLE_STREAM_SCHEDULES + stream_schedules.MULTI_STREAM_SCHEDULES + graph_schedules.GRAPH_SCHEDULES


def sees_nothing():
    return lambda: False


def sees_everything():
    return lambda: True


def sees_every_third():
    numbers = itertools.count()
    return lambda: next(numbers) % 3 == 2


def sees_some():
    generator = random.Random(0)
    return lambda: generator.random() < 0.4


def check_order_and_bits(schedule, sees_done):
    plain, expected = record(schedule, has_engine=False)
    assert list(map(str, plain.unordered)) == []  # otherwise the program itself is wrong
    device, program = record(schedule, sees_done=sees_done)
    assert list(map(str, device.unordered)) == []
    assert len(program.results) == len(expected.results)
    assert all(map(torch.equal, program.results, expected.results))


def list_schedules_and_visible_events():
    for schedule, sees_done in itertools.product(SCHEDULES, (sees_nothing, sees_everything, sees_every_third, sees_some)):
        yield pytest.param(schedule, sees_done, id=f"{schedule.__name__}-{sees_done.__name__}")


@pytest.mark.parametrize(("schedule", "sees_done"), list(list_schedules_and_visible_events()))
def test_accesses_to_the_same_bytes_are_ordered_and_results_are_bitwise_identical(schedule, sees_done):
    check_order_and_bits(schedule, sees_done())


@pytest.mark.parametrize("hazard", Hazard, ids=lambda hazard: hazard.name)
def test_removing_all_waits_for_one_hazard_leaves_accesses_unordered(hazard):
    assert any(record(schedule, leaves_out=leaves_out_hazard(hazard))[0].unordered for schedule in SCHEDULES)


@functools.cache
def find_waits():
    """Return, for each wait in the source, the schedules that execute it; only they can fail without it."""
    found = collections.defaultdict(dict)
    for schedule in SCHEDULES:
        for wait in record(schedule)[0].waits:
            found[wait.hazard, wait.site][schedule] = wait
    return found


@pytest.mark.parametrize("hazard", Hazard, ids=lambda hazard: hazard.name)
def test_removing_any_single_wait_leaves_accesses_unordered(hazard):
    sites_with_schedules = {site: reached for (of, site), reached in find_waits().items() if of is hazard}
    assert sites_with_schedules
    redundant = [
        site
        for site, reached in sites_with_schedules.items()
        if not any(record(schedule, leaves_out=leaves_out_site(wait))[0].unordered for schedule, wait in reached.items())
    ]
    assert redundant == []


def test_every_wait_in_the_engine_source_is_executed():
    reached = {wait.line for waits in find_waits().values() for wait in waits.values()}
    missed = []
    for path in Path(fgoffload.engine.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in ("wait_event", "wait_stream") and path.name != "device.py":
                is_reached = any((str(path), line) in reached for line in range(node.lineno, node.end_lineno + 1))
                if len(node.args) == 3 and not is_reached:
                    missed.append(f"{path.name}:{node.lineno}")
    assert missed == []


@given(setup=setups())
@settings(max_examples=25, deadline=None)
def test_random_multistream_programs_are_ordered_and_bitwise_identical(setup):
    check_order_and_bits(lambda program: run_setup(program, setup), make_sees_done(setup))
