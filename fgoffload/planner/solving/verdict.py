"""What a simulation says of what the layers of a rank do, and what is known of many of those."""

import dataclasses
from collections.abc import Callable, Mapping

from fgoffload.plan import OffloadPlan
from fgoffload.planner.simulation.simulation_result import StretchKey
from fgoffload.planner.solving.placement import State


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a simulation says of a plan."""

    step_s: float
    """How long the step takes."""
    peak_bytes: int
    """The most on the device."""
    peaks: Mapping[StretchKey, int] | None = None
    """The most at each stretch, where that was asked for."""


Judge = Callable[[OffloadPlan], Verdict]
"""Simulates a rank under a plan, alone or with its neighbours."""

Knowledge = dict[object, tuple[State, Verdict]]
"""What a judge said of states, by their keys."""


def make_key(state: State) -> object:
    """Return what is equal for states that do the same."""
    return tuple(configuration.actions for configuration in state)
