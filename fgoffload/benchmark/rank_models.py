"""Builds the planner's model of a training for the benchmark, and plans for a memory budget."""

import dataclasses
from collections.abc import Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.settings import BASELINE, Setting, System
from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_shapes import read_model
from fgoffload.integrations.megatron.graphs.graph_checks import read_graphs
from fgoffload.plan import OffloadPlan
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
from fgoffload.trainer.training_policy import Update

ANY_OF_OURS = Setting(system=System.OURS, modules=("core_attn",))
"""Any setting of our engine. All of them share the flags for the window and the sizes."""

_GRADIENTS_ALONE = ParameterState(gradient_bytes=2, main_parameter_bytes=0, moment_bytes=0)
"""Parameter state without an optimizer. Gradients have the parameters' type, bf16."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for a memory budget, with its predicted peak."""

    plan: OffloadPlan
    """Plan for all ranks."""
    peak_bytes: int
    """Predicted peak device bytes, the maximum over ranks."""


def plan_for_budget(ranks: Sequence[RankModel], *, budget_bytes: int, free_bytes: int = 0) -> Planned:
    """Return the fastest plan within a memory budget.

    Raises:
        BudgetError: No plan fits.
    """
    solution = solve_leaving_free(ranks, budget_bytes=budget_bytes, free_bytes=free_bytes, layer_passes=THOROUGH_LAYER_PASSES)
    return Planned(plan=solution.plan, peak_bytes=solution.result.peak_bytes)


def check_profile(profile: Profile, arguments: TrainingArguments, *, update: Update, source: str) -> None:
    """Check that a profile matches the training, and was measured as the benchmark measures.

    Raises:
        ConfigError: The profile does not match. The error names the difference and the fix.
    """
    here = "Give --profile without a file, and it is measured here."
    layers, wanted = sum(len(rank.layers) for rank in profile.ranks), arguments.transformer["num_layers"]
    if layers not in (wanted, wanted + (arguments.transformer.get("mtp_num_layers") or 0)):
        raise ConfigError(f"{source} has {layers} layers, but the model has {wanted}. {here}")
    if profile.has_optimizer != (update is not Update.NONE):
        words = ("without an optimizer", "with an optimizer")
        raise ConfigError(
            f"{source} was measured {words[profile.has_optimizer]}, and this benchmark runs {words[not profile.has_optimizer]} "
            f"(--with-optimizer). {here}"
        )


def build_profile_ranks(job: Job, profile: Profile) -> tuple[RankModel, ...]:
    """Return the planner's model of each pipeline rank of a job, from a profile and the job's steps and sizes.

    Raises:
        ConfigError: The schedule does not support the number of microbatches.
    """
    arguments = parse_setting_arguments(job, BASELINE, world_size=job.world_size)
    offload = parse_setting_arguments(job, ANY_OF_OURS, world_size=job.world_size).offload
    policy = None if offload is None else offload.transfer_policy
    ranks = make_rank_models(profile, policy=policy, microbatches=arguments.num_microbatches)
    has_shared_overlap = bool(arguments.transformer.get("moe_shared_expert_overlap"))
    graphs = read_graphs(arguments.transformer)
    return tuple(capture_rank(rank, graphs, has_shared_overlap=has_shared_overlap) for rank in ranks)


def build_job_ranks(job: Job, hardware: Hardware | None) -> tuple[RankModel, ...]:
    """Return the planner's model of each pipeline rank of a job, with the times of a device.

    Args:
        job: The benchmark's options.
        hardware: The device; None if it is not in the table.

    Raises:
        ConfigError: The device is not in the table, or the planner does not support the model.
    """
    return build_workload(
        parse_setting_arguments(job, BASELINE, world_size=job.world_size),
        hardware,
        offload=parse_setting_arguments(job, ANY_OF_OURS, world_size=job.world_size).offload,
        flags=(*job.file_flags, *job.typed_flags),
        source=job.source,
        update=job.update,
    )


def build_workload(
    arguments: TrainingArguments,
    hardware: Hardware | None,
    *,
    offload: OffloadConfig | None = None,
    flags: Sequence[str],
    source: str,
    update: Update,
) -> tuple[RankModel, ...]:
    """Return the planner's model of each pipeline rank of a benchmark.

    Args:
        arguments: The training, without offload and recompute.
        hardware: The device; None if it is not in the table.
        offload: Options with the window and sizes of our engine; None uses the defaults.
        flags: Megatron flags from which `arguments` were parsed.
        source: The argument file, for errors.
        update: Parameter update at the end of a step, if any.

    Raises:
        ConfigError: The device is not in the table, or the planner does not support the model.
    """
    if hardware is None:
        raise ConfigError(f"{source}: the planner's hardware table lacks this device. Give plan files with --plans.")
    model, parallelism = read_model(flags, source=source, num_gpus=arguments.world_size)
    if model.experts is not None:
        # Tokens are random, so all experts receive about the same number.
        model = dataclasses.replace(model, experts=dataclasses.replace(model.experts, imbalance=1.0))
    fields = arguments.transformer
    # The kernels here follow Megatron-Core's defaults. `read_model` assumes Megatron-LM's defaults, which fuse more.
    model = dataclasses.replace(model, has_fused_rotary=bool(fields.get("apply_rope_fusion", False)))
    execution = Execution(
        has_fused_dropout_add=bool(fields.get("bias_dropout_fusion", False)),
        has_fused_gradient_accumulation=bool(fields.get("gradient_accumulation_fusion", False)),
    )
    state = _GRADIENTS_ALONE if update is Update.NONE else ADAM
    assumptions = Assumptions(state=state, reserve_bytes=0, execution=execution, graphs=read_graphs(fields))
    if offload is not None:
        assumptions = dataclasses.replace(
            assumptions,
            policy=offload.transfer_policy,
            min_offloaded_numel=offload.min_offloaded_tensor_size,
        )
    return build_ranks(model, parallelism, hardware, assumptions=assumptions)
