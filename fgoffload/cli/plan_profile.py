"""Plans from a profile: checks that it fits the planned training, and builds the ranks from it.

A profile fixes times, saved bytes and static memory. The number of microbatches, the reserve, window, prefetch and the
smallest offloaded size may differ. Everything else is compared, so that no plan is made for another model.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
"""Fields that may differ from the measured training. Each kind of fused gate saves the same bytes."""

_FLAGS: Mapping[str, str] = {
    "has_fused_activation": "--bias-swiglu-fusion",
    "has_fused_rotary": "--rope-fusion",
    "experts.has_fused_permutation": "--moe-permute-fusion",
    "has_optimizer": "--with-optimizer",
}
"""Flags of fields whose name differs from the flag's."""


class _Difference(NamedTuple):
    what: str
    measured: object
    planned: object


def build_profiled_ranks(
    profile: Profile, path: Path, checked: PlanOptions, model: ModelShape, parallelism: Parallelism, assumptions: Assumptions
) -> tuple[RankModel, ...]:
    """Build the pipeline ranks from a profile, adapted to the planned training.

    Args:
        profile: The measured profile.
        path: Its file, for errors.
        checked: The options: the model's file, the reserve, and whether optimizer states count.
        model: The planned model.
        parallelism: Its parallel sizes and microbatches.
        assumptions: Assumptions from its other flags.

    Raises:
        ConfigError: The profile is of another training; names the first difference.
    """
    if profile.training is None:
        raise ConfigError(
            f"profile {path} lacks the measured training. Measure again: fgoffload profile {checked.model} --json {path}."
        )
    differences = _compare_trainings(profile.training, path, checked, (parallelism, model, assumptions))
    first = next(differences, None)
    if first is None and checked.has_optimizer not in (None, profile.has_optimizer):
        first = _Difference("has_optimizer", profile.has_optimizer, checked.has_optimizer)
    if first is not None:
        flag = _FLAGS.get(first.what)
        said = "" if flag is None else f" ({flag if first.measured else flag.replace('--', '--no-', 1)})"
        raise ConfigError(
            f"profile {path} is of {profile.training.source} with {first.what} {_shorten(first.measured)}{said}, and "
            f"{checked.model} has {_shorten(first.planned)}. Plan with the model and the flags that were measured, or measure "
            f"this one: fgoffload profile {checked.model} --json {path}."
        )
    if assumptions.graphs != NO_CAPTURE:
        logger.warning(
            "profile %s is of eager steps: if they were launch-bound, steps with CUDA graphs are faster than predicted.", path
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


def _compare_trainings(
    training: MeasuredTraining, path: Path, checked: PlanOptions, planned: tuple[Parallelism, ModelShape, Assumptions]
) -> Iterator[_Difference]:
    source = f"profile {path}"
    with _no_warnings():
        model, parallelism = read_model(training.flags, source=source, num_gpus=training.world_size)
        assumptions = read_assumptions(training.flags, source=source, has_optimizer=checked.has_optimizer is not False)
    # Parallel sizes first: others follow from them, such as the padded vocabulary.
    yield from _compare_fields("", parallelism, planned[0])
    yield from _compare_fields("", model, planned[1])
    yield from _compare_fields("", assumptions.state, planned[2].state)
    yield from _compare_fields("", assumptions.execution, planned[2].execution)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Drop warnings while flags are read: the planned training's flags gave the same ones already."""
    logger = logging.getLogger("fgoffload")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _compare_fields(prefix: str, measured: Any, planned: Any) -> Iterator[_Difference]:
    for field in dataclasses.fields(measured):
        one, other = getattr(measured, field.name), getattr(planned, field.name)
        if field.name in _FREE_FIELDS:
            continue
        if dataclasses.is_dataclass(one) and dataclasses.is_dataclass(other):
            yield from _compare_fields(f"{field.name}.", one, other)
        elif one != other:
            yield _Difference(f"{prefix}{field.name}", one, other)


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
