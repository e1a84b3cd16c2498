"""Builds the model of each pipeline rank from a profile, after checking that the profile matches the planned run.

The profile provides times, saved bytes and static memory. The planned run may differ from the measured one only in the number
of microbatches, the reserve, the window, the prefetch, the minimum offloaded size, and the use of CUDA graphs.
"""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fgoffload.cli.plan_options import PlanOptions
from fgoffload.cuda_graphs import NO_CAPTURE
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model_ranks import Assumptions
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.ranks.captured_layer import capture_rank
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import MeasuredTraining, Profile

logger = logging.getLogger(__name__)

_FREE_FIELDS = frozenset({"name", "microbatches", "has_quick_gate"})
"""Fields that may differ between the measured and the planned run. The type of fused gate does not change the saved bytes."""


def build_profiled_ranks(
    profile: Profile, path: Path, checked: PlanOptions, model: ModelShape, parallelism: Parallelism, assumptions: Assumptions
) -> tuple[RankModel, ...]:
    """Build the pipeline ranks from `profile`, which was read from `path`, and adapt them to the planned run.

    Raises:
        ConfigError: The profile was measured on a different run. The message shows the first difference.
    """
    measure = f"fgoffload profile {checked.model} --json {path}"
    if profile.training is None:
        raise ConfigError(f"profile {path} does not contain the flags of the measured run. Measure again: {measure}.")
    differences = [*_compare_runs(profile.training, checked, model, parallelism, assumptions)]
    if checked.has_optimizer not in (None, profile.has_optimizer):
        differences.append(("has_optimizer", profile.has_optimizer, checked.has_optimizer))
    if differences:
        name, measured, planned = differences[0]
        raise ConfigError(
            f"profile {path} was measured on {profile.training.source} with {name} {measured!s:.60}, but {checked.model} has "
            f"{planned!s:.60}. Plan with the measured model and flags, or measure this model: {measure}."
        )
    if assumptions.graphs != NO_CAPTURE:
        logger.warning(
            "profile %s was measured without CUDA graphs. If that run was launch-bound, steps are faster than predicted.", path
        )
    has_shared_overlap = model.experts is not None and model.experts.has_shared_overlap
    return tuple(
        dataclasses.replace(
            capture_rank(rank, assumptions.graphs, has_shared_overlap=has_shared_overlap),
            static_bytes=rank.static_bytes + (checked.reserve_bytes or 0),
            min_offloaded_numel=assumptions.min_offloaded_numel,
        )
        for rank in make_rank_models(profile, policy=assumptions.policy, microbatches=parallelism.microbatches)
    )


def _compare_runs(
    training: MeasuredTraining, checked: PlanOptions, model: ModelShape, parallelism: Parallelism, assumptions: Assumptions
) -> Iterator[tuple[str, object, object]]:
    """Yield the name, the measured value and the planned value of each field that differs."""
    source = str(checked.model)  # the same for both runs, so that a warning about both is shown only once
    measured_model, measured_parallelism = read_model(training.flags, source=source, num_gpus=training.world_size)
    measured = read_assumptions(training.flags, source=source, has_optimizer=checked.has_optimizer is not False)
    # Compare parallel sizes first, since other fields, such as the padded vocabulary, depend on them.
    yield from _compare_fields("", measured_parallelism, parallelism)
    yield from _compare_fields("", measured_model, model)
    yield from _compare_fields("", measured.state, assumptions.state)
    yield from _compare_fields("", measured.execution, assumptions.execution)


def _compare_fields(prefix: str, measured: Any, planned: Any) -> Iterator[tuple[str, object, object]]:
    for field in dataclasses.fields(measured):
        one, other = getattr(measured, field.name), getattr(planned, field.name)
        if field.name in _FREE_FIELDS:
            continue
        if dataclasses.is_dataclass(one) and dataclasses.is_dataclass(other):
            yield from _compare_fields(f"{field.name}.", one, other)
        elif one != other:
            yield f"{prefix}{field.name}", one, other
