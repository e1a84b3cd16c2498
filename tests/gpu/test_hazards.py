"""Each wait of the engine is needed: with all of them the bits are the same, and without any one of them they are not.

Each scenario puts one piece of work behind a sleep, so that only the wait in question keeps another from overtaking it.
"""

import pytest
from support.hostile import HostileGpu
from support.programs import have_same_bits
from support.scenarios import SCENARIOS, Bench, make_engine

from fgoffload.engine import Hazard

pytestmark = pytest.mark.usefixtures("_deterministic", "_any_stream_may_accumulate")


def is_right(hazard: Hazard, *, left_out: Hazard | None) -> bool:
    """Return whether the scenario of `hazard` gives the bits that it gives without an engine."""
    device = HostileGpu(left_out=left_out)
    expected = SCENARIOS[hazard](Bench(device, None))
    engine = make_engine(device, hazard)
    found = SCENARIOS[hazard](Bench(device, engine))
    same = have_same_bits(expected, found)
    engine.close()
    return same


def test_each_hazard_has_a_scenario():
    assert set(SCENARIOS) == set(Hazard)


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_with_all_waits_the_bits_are_the_same(hazard):
    assert is_right(hazard, left_out=None)


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_without_its_wait_the_bits_differ(hazard):
    assert not is_right(hazard, left_out=hazard)
