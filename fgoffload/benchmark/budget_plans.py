"""Plans for a memory budget, and tries each plan before the measurement.

A profile has the times of each layer of this model on this device; the hardware table does not. Neither predicts the temporary
memory of operators to the byte. So a plan that exceeds the budget is replaced by one that leaves the excess free, as with
`--offload-modules auto`.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fgoffload.benchmark.settings import Setting
from fgoffload.errors import PlanError
from fgoffload.output_files import write_file
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.solver import THOROUGH_LAYER_PASSES, solve_leaving_free
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

MOST_PLANS = 3
"""Maximum number of plans tried for a budget. The last one is used, whatever its peak."""

TryPlan = Callable[[Setting], int | None]
"""Runs a setting for a few steps on all ranks together, and returns its peak bytes; None if no allocator counts bytes."""


def plan_budget(setting: Setting, ranks: Sequence[RankModel], path: Path, try_plan: TryPlan | None) -> Setting:
    """Return `setting` with the first plan whose trial stays within its budget, or else with the last one tried.

    Args:
        setting: A setting with a budget.
        ranks: The planner's model of the training.
        path: File of the plan.
        try_plan: Called on all ranks together. None takes the first plan without a trial.

    Raises:
        PlanError: No plan fits the budget.
    """
    budget_bytes, free_bytes, planned = setting.budget_bytes or 0, 0, setting.with_plan(path)
    for number in range(MOST_PLANS):
        try:
            solution = solve_leaving_free(
                ranks, budget_bytes=budget_bytes, free_bytes=free_bytes, layer_passes=THOROUGH_LAYER_PASSES
            )
        except PlanError as error:
            if number == 0:
                raise
            logger.warning("%s: keeping the plan, since none takes less. %s", setting.name, error)
            break
        write_file(path, solution.plan.to_json())
        peak_bytes = None if try_plan is None else try_plan(planned)
        if peak_bytes is None or peak_bytes <= budget_bytes:
            break
        beyond_bytes = peak_bytes - solution.result.peak_bytes
        taken, beyond = format_bytes(peak_bytes), format_bytes(max(0, beyond_bytes))
        logger.warning("%s: a plan took %s, %s more than predicted", setting.name, taken, beyond)
        free_bytes = max(free_bytes, beyond_bytes)
    return planned
