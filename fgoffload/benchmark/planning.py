"""A plan for a memory budget: where the benchmark asks the planner."""

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.training_arguments import TrainingArguments
from fgoffload.plan import OffloadPlan
from fgoffload.planner.hardware import Hardware
from fgoffload.units import format_bytes


def plan_for_budget(arguments: TrainingArguments, hardware: Hardware | None, *, budget_bytes: int) -> OffloadPlan:
    """Return the plan that takes the least step time within a memory budget.

    Args:
        arguments: The training, without offload and recompute.
        hardware: The device that it runs on; None where the table does not have it.
        budget_bytes: Of each device.

    Raises:
        ConfigError: Always: the planner is not built yet.
    """
    raise ConfigError(
        f"--budgets {format_bytes(budget_bytes)}: the planner is not built yet in this version. Give plan files with --plans."
    )
