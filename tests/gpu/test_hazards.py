"""Tests that each wait of the engine is necessary: results are bitwise identical with all waits, and differ without any one.

Each scenario delays one operation by a sleep, so that only the wait under test keeps another one from overtaking it.
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


def is_bitwise_identical(
    hazard: Hazard, *, left_out: Hazard | None = None, scenario: Scenario | None = None, late_ms: float = LATE_MS[0]
) -> bool:
    """Return whether `scenario`, by default that of `hazard`, is bitwise identical to a run without an engine."""
    scenario = scenario or SCENARIOS[hazard]
    expected = run(hazard, scenario, HostileGpu(), has_engine=False)
    # Warm-up: the driver loads kernels at their first use, and may synchronize all streams.
    run(hazard, scenario, HostileGpu(), has_engine=True)
    found = run(hazard, scenario, HostileGpu(left_out=left_out), has_engine=True, late_ms=late_ms)
    return are_bitwise_identical(expected, found)


GRAPH_HAZARDS = {hazard for hazard in Hazard if hazard.name.startswith(("SLOT_", "GRAPH_"))}
"""Tested on the recording device: `tests/unit/engine/test_happens_before.py`."""


def test_each_hazard_has_a_scenario():
    assert set(SCENARIOS) == set(Hazard) - GRAPH_HAZARDS


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_results_are_bitwise_identical_with_all_waits(hazard):
    assert is_bitwise_identical(hazard)


@pytest.mark.parametrize("hazard", SCENARIOS, ids=lambda hazard: hazard.name)
def test_results_differ_without_the_wait(hazard):
    assert not all(is_bitwise_identical(hazard, left_out=hazard, late_ms=late_ms) for late_ms in LATE_MS)


def test_memory_is_freed_only_after_reads_by_a_second_save_on_another_stream():
    assert is_bitwise_identical(Hazard.SOURCE_STILL_COPIED, scenario=saved_again_after_its_offload)
