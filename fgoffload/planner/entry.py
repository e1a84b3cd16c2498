"""Entry point of the planner: finds the fastest plan for a model, its parallel sizes, a device and a memory budget.

    >>> from fgoffload.planner import Hardware, ModelShape, Parallelism, get_hardware, plan
    >>> from fgoffload.planner import ExpertsShape
    >>> from fgoffload.units import GIB
    >>> model = ModelShape(
    ...     name="a mixture of 8 experts",
    ...     num_layers=8,
    ...     hidden_size=4096,
    ...     num_attention_heads=32,
    ...     num_query_groups=8,
    ...     kv_channels=128,
    ...     vocab_size=32000,
    ...     seq_length=4096,
    ...     experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=14336),
    ... )
    >>> ranks = Parallelism(pipeline_parallel_size=2, expert_parallel_size=8, data_parallel_size=8, microbatches=8)
    >>> report = plan(model, ranks, get_hardware("h100"), budget_bytes=23 * GIB)
    >>> report.baselines["baseline"].peak_bytes > 23 * GIB
    True
    >>> report.solution.result.peak_bytes <= 23 * GIB
    True
    >>> report.solution.result.step_s < report.baselines["full recompute"].step_s
    True

`report.solution.plan.to_json()` returns the contents of a plan file for `--offload-plan`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model_ranks import Assumptions, build_ranks
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.solving.solver import DEFAULT_LAYER_PASSES, Solution, solve
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.training_facts import list_facts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan, its prediction, and the baselines to compare it with."""

    ranks: tuple[RankModel, ...]  # pipeline ranks that the plan covers, including their host budget
    baselines: Mapping[str, StepResult]
    """`baseline`, `full recompute`, `selective recompute` and `offload everything`. They can exceed the memory budget. Once
    `offload everything` has used up the host budget, further tensors stay on the GPU."""
    solution: Solution


def plan(
    model: ModelShape,
    parallelism: Parallelism,
    hardware: Hardware,
    *,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    assumptions: Assumptions | None = None,
) -> PlanReport:
    """Return the fastest plan found whose peak device memory is within `budget_bytes` on every rank.

    Args:
        model: The whole model.
        parallelism: Parallel sizes, and the number of microbatches per step.
        hardware: Device of each rank.
        budget_bytes: Memory budget of each device, static memory included.
        host_budget_bytes: Host memory budget of each rank, or None for no limit.
        assumptions: Assumptions of the prediction. None means the defaults.

    Raises:
        ConfigError: An argument is invalid, or the device lacks a rate that the prediction needs.
        PlanError: No plan fits. The message names a rank, its excess over the budget, and the smallest budget that has a plan.
    """
    ranks = build_ranks(model, parallelism, hardware, assumptions=assumptions)
    report = plan_ranks(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes)
    made_for = dataclasses.replace(report.solution.plan, made_for=list_facts(model, parallelism))
    return dataclasses.replace(report, solution=dataclasses.replace(report.solution, plan=made_for))


def plan_ranks(
    ranks: Sequence[RankModel],
    *,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    layer_passes: int = DEFAULT_LAYER_PASSES,
) -> PlanReport:
    """Return the fastest plan found for `ranks`, for example the ranks of a profile. `layer_passes` sets the search effort."""
    solution = solve(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, layer_passes=layer_passes)
    if host_budget_bytes is not None:
        ranks = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    return PlanReport(ranks=tuple(ranks), baselines=solution.baselines, solution=solution)
