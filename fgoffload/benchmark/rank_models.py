"""Builds the planner's model of a training run, and plans for a memory budget.

Predictions of temporary memory are inexact. If the trial run of a plan exceeds the budget, the next plan leaves the prediction
error free, as `--offload-modules auto` does.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.settings import BASELINE, Setting, System
from fgoffload.errors import ConfigError, PlanError
from fgoffload.integrations.megatron.flags.model_shapes import read_model
from fgoffload.integrations.megatron.graphs.graph_checks import read_graphs
from fgoffload.output_files import write_file
from fgoffload.planner.memory.static_memory import ADAM, ParameterState
from fgoffload.planner.model_ranks import Assumptions, build_ranks
from fgoffload.planner.operations.ops import Execution
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.ranks.captured_layer import capture_rank
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.solver import THOROUGH_LAYER_PASSES, solve_leaving_free
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.timing.profile import Profile
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

ANY_OF_OURS = Setting(system=System.OURS, modules=("core_attn",))
"""Any setting of our engine, from which we read the window and the minimum tensor size that all such settings share."""

_GRADIENTS_ALONE = ParameterState(gradient_bytes=2, main_parameter_bytes=0, moment_bytes=0)
"""Parameter state without an optimizer. Gradients are bf16 like the parameters."""

_MAX_PLANS = 3
"""Maximum number of plans to try for a budget. The last one is used even if it exceeds the budget."""

TryPlan = Callable[[Setting], int | None]
"""Function that runs a setting for a few steps on all ranks together. It returns the peak bytes, or None on a CPU."""


def load_profile(job: Job, device: str) -> Profile | None:
    """Return the job's profile, or None without one. A profile from another device is ignored with a warning."""
    if job.profile is None:
        return None
    profile = Profile.load(job.profile)
    if profile.device == device:
        return profile
    logger.warning("ignoring the profile, which was measured on %s, since this device is %s", profile.device, device)
    return None


def check_profile(job: Job, arguments: TrainingArguments) -> None:
    """Raise ConfigError if the profile's number of layers or optimizer setting differs from the job's."""
    if job.profile is None:
        return
    profile, source = Profile.load(job.profile), f"--profile {job.profile}"
    fix = "Use --profile without a file to measure a profile now."
    layers, wanted = sum(len(rank.layers) for rank in profile.ranks), arguments.transformer["num_layers"]
    if layers not in (wanted, wanted + (arguments.transformer.get("mtp_num_layers") or 0)):
        raise ConfigError(f"{source} has {layers} layers, but the model has {wanted}. {fix}")
    if profile.has_optimizer != job.has_optimizer:
        words = ("without an optimizer", "with an optimizer")
        raise ConfigError(
            f"{source} was measured {words[profile.has_optimizer]}, but this benchmark runs {words[job.has_optimizer]} "
            f"(--with-optimizer). {fix}"
        )


def build_profile_ranks(job: Job, profile: Profile) -> tuple[RankModel, ...]:
    """Return the planner's model of each pipeline rank, with times from a profile."""
    arguments = parse_setting_arguments(job, BASELINE)
    offload: Any = parse_setting_arguments(job, ANY_OF_OURS).offload
    ranks = make_rank_models(profile, policy=offload.transfer_policy, microbatches=arguments.num_microbatches)
    has_shared_overlap = bool(arguments.transformer.get("moe_shared_expert_overlap"))
    graphs = read_graphs(arguments.transformer)
    return tuple(capture_rank(rank, graphs, has_shared_overlap=has_shared_overlap) for rank in ranks)


def build_table_ranks(job: Job, hardware: Hardware | None) -> tuple[RankModel, ...]:
    """Return the planner's model of each pipeline rank, with times from the hardware table.

    Raises:
        ConfigError: The device is not in the table, or the planner does not support the model.
    """
    if hardware is None:
        raise ConfigError(f"{job.source}: this device is not in the planner's hardware table. Use --profile or --plans.")
    arguments = parse_setting_arguments(job, BASELINE)
    offload: Any = parse_setting_arguments(job, ANY_OF_OURS).offload
    flags = (*job.file_flags, *job.typed_flags)
    model, parallelism = read_model(flags, source=job.source, num_gpus=arguments.world_size)
    if model.experts is not None:
        # Tokens are random, so the experts are balanced.
        model = dataclasses.replace(model, experts=dataclasses.replace(model.experts, imbalance=1.0))
    fields = arguments.transformer
    # The trainer uses Megatron-Core's defaults. `read_model` assumes Megatron-LM's defaults, which fuse more.
    model = dataclasses.replace(model, has_fused_rotary=bool(fields.get("apply_rope_fusion", False)))
    execution = Execution(
        has_fused_dropout_add=bool(fields.get("bias_dropout_fusion", False)),
        has_fused_gradient_accumulation=bool(fields.get("gradient_accumulation_fusion", False)),
    )
    state = ADAM if job.has_optimizer else _GRADIENTS_ALONE
    assumptions = Assumptions(
        state=state,
        reserve_bytes=0,
        execution=execution,
        graphs=read_graphs(fields),
        policy=offload.transfer_policy,
        min_offloaded_numel=offload.min_offloaded_tensor_size,
    )
    return build_ranks(model, parallelism, hardware, assumptions=assumptions)


def plan_budget(setting: Setting, ranks: Sequence[RankModel], path: Path, try_plan: TryPlan | None) -> Setting:
    """Return `setting` with the first plan whose trial run stays within the budget, or else with the last plan.

    The plan is written to `path`. Without `try_plan`, the first plan is accepted.

    Raises:
        PlanError: No plan fits the budget.
    """
    budget_bytes, free_bytes, planned = setting.budget_bytes or 0, 0, setting.with_plan(path)
    for number in range(_MAX_PLANS):
        try:
            solution = solve_leaving_free(
                ranks, budget_bytes=budget_bytes, free_bytes=free_bytes, layer_passes=THOROUGH_LAYER_PASSES
            )
        except PlanError as error:
            if number == 0:
                raise
            logger.warning("%s: the plan exceeds the budget, and no plan leaves enough memory free. %s", setting.name, error)
            break
        write_file(path, solution.plan.to_json())
        peak_bytes = None if try_plan is None else try_plan(planned)
        if peak_bytes is None or peak_bytes <= budget_bytes:
            break
        excess_bytes = max(0, peak_bytes - solution.result.peak_bytes)
        peak, excess = format_bytes(peak_bytes), format_bytes(excess_bytes)
        logger.warning("%s: the plan's peak is %s, which is %s above the prediction", setting.name, peak, excess)
        free_bytes = max(free_bytes, excess_bytes)
    return planned
