"""Tests that each wait of the engine is necessary: results are bitwise identical with all waits, and differ without any one.

Each scenario puts one piece of work behind a sleep, so that only the wait in question keeps another from overtaking it.
"""

import pytest
import torch
from support.hostile import HostileGpu
from support.programs import are_bitwise_identical
from support.scenarios import LATE_MS, SCENARIOS, Bench, Scenario, make_engine, saved_again_after_its_offload

from fgoffload.engine import Hazard

pytestmark = pytest.mark.usefixtures("_deterministic", "_any_stream_may_accumulate")


def run(
    hazard: Hazard, scenario: Scenario, device: HostileGpu, *, has_engine: bool, late_ms: float = LATE_MS[0]
) -> list[torch.Tensor]:
    engine = make_engine(device, hazard) if has_engine else None
    found = scenario(Bench(device, engine, late_ms=late_ms))
    torch.cuda.synchronize()
    if engine:
        engine.close()
    return found


def is_right(
    hazard: Hazard, *, left_out: Hazard | None = None, scenario: Scenario | None = None, late_ms: float = LATE_MS[0]
) -> bool:
    """Return whether `scenario`, by default that of `hazard`, gives the bits that it gives without an engine."""
    scenario = scenario or SCENARIOS[hazard]
    expected = run(hazard, scenario, HostileGpu(), has_engine=False)
    # Once in vain: the driver loads kernels when they are first used, and may wait for all streams then.
    run(hazard, scenario, HostileGpu(), has_engine=True)
    found = run(hazard, scenario, HostileGpu(left_out=left_out), has_engine=True, late_ms=late_ms)
    return are_bitwise_identical(expected, found)


OF_GRAPHS = {hazard for hazard in Hazard if hazard.name.startswith(("SLOT_", "GRAPH_"))}
"""Shown on the recording device: `tests/unit/engine/test_happens_before.py`."""


def test_each_hazard_has_a_scenario():
    assert set(SCENARIOS) == set(Hazard) - OF_GRAPHS


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_with_all_waits_the_bits_are_the_same(hazard):
    assert is_right(hazard)


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_without_its_wait_the_bits_differ(hazard):
    assert not all(is_right(hazard, left_out=hazard, late_ms=late_ms) for late_ms in LATE_MS)


def test_a_storage_that_has_left_and_is_saved_again_on_another_stream_is_read_before_its_memory_goes():
    assert is_right(Hazard.SOURCE_STILL_COPIED, scenario=saved_again_after_its_offload)
