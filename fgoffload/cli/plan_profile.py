"""Plans from a profile: checks that it fits the planned training, and builds the ranks from it.

A profile fixes times, saved bytes and static memory. The number of microbatches, the reserve, window, prefetch and the
smallest offloaded size may differ. Everything else is compared, so that no plan is made for another model.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fgoffload.captured_tags import NO_CAPTURE
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model_ranks import Assumptions
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.ranks.captured_layer import capture_rank
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import Profile

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
    """A difference between the measured and the planned training."""

    what: str
    measured: object
    planned: object


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """The planned training."""

    source: str
    """The model's file, as the user typed it."""
    model: ModelShape
    """The whole model."""
    parallelism: Parallelism
    """Parallel sizes and microbatches."""
    assumptions: Assumptions
    """Assumptions from its other flags."""
    has_optimizer: bool | None
    """Whether optimizer states count; None takes the profile's."""


def build_profiled_ranks(
    profile: Profile, planned: PlannedTraining, *, path: Path, reserve_bytes: int
) -> tuple[RankModel, ...]:
    """Build the pipeline ranks from a profile, adapted to the planned training.

    Args:
        profile: The measured profile.
        planned: The planned training.
        path: The profile's file, for errors.
        reserve_bytes: Added to static memory.

    Raises:
        ConfigError: The profile is of another training; names the first difference.
    """
    check_profile(profile, path, planned)
    ranks = make_rank_models(profile, policy=planned.assumptions.policy, microbatches=planned.parallelism.microbatches)
    least_numel, graphs = planned.assumptions.min_offloaded_numel, planned.assumptions.graphs
    if graphs != NO_CAPTURE:
        logger.warning(
            "profile %s is of eager steps: if they were launch-bound, steps with CUDA graphs are faster than predicted.", path
        )
    experts = planned.model.experts
    has_shared_overlap = experts is not None and experts.has_shared_overlap
    return tuple(
        dataclasses.replace(
            capture_rank(rank, graphs, has_shared_overlap=has_shared_overlap),
            static_bytes=rank.static_bytes + reserve_bytes,
            min_offloaded_numel=least_numel,
        )
        for rank in ranks
    )


def check_profile(profile: Profile, path: Path, planned: PlannedTraining) -> None:
    """Refuse a profile of another training than the planned one.

    Args:
        profile: The measured profile.
        path: Its file, for errors.
        planned: The planned training.

    Raises:
        ConfigError: With the first difference.
    """
    source, model, parallelism = planned.source, planned.model, planned.parallelism
    profile.get_rank(0)  # refuses a profile of the link alone
    if profile.training is None:
        raise ConfigError(
            f"profile {path} lacks the measured training. Measure again: fgoffload profile {source} --json {path}."
        )
    first = next(
        itertools.chain(
            _compare_pipelines(profile, parallelism),
            _compare_layers(profile, model, parallelism),
            _compare_flags(profile, path, planned),
            () if planned.has_optimizer is None else _compare("has_optimizer", profile.has_optimizer, planned.has_optimizer),
        ),
        None,
    )
    if first is not None:
        what, measured, wanted = first
        flag = _FLAGS.get(what)
        said = "" if flag is None else f" ({flag if measured else flag.replace('--', '--no-', 1)})"
        raise ConfigError(
            f"profile {path} is of {profile.training.source} with {what} {_shorten(measured)}{said}, and {source} has "
            f"{_shorten(wanted)}. Plan with the model and the flags that were measured, or measure this one: "
            f"fgoffload profile {source} --json {path}."
        )


def _compare_pipelines(profile: Profile, parallelism: Parallelism) -> Iterator[_Difference]:
    measured, planned = profile.get_rank(0).pipeline, parallelism.pipeline
    yield from _compare("pipeline_parallel_size", measured.stages, planned.stages)
    yield from _compare("pipeline ranks", [rank.rank for rank in profile.ranks], list(range(planned.stages)))
    yield from _compare("virtual_pipeline_size", measured.chunks, planned.chunks)
    if planned.chunks > 1:
        yield from _compare("microbatch_group_size", measured.microbatches_of_group, planned.microbatches_of_group)
    yield from _compare("has_expert_overlap", measured.has_expert_overlap, planned.has_expert_overlap)


def _compare_layers(profile: Profile, model: ModelShape, parallelism: Parallelism) -> Iterator[_Difference]:
    layers = {layer.number: layer.model for rank in profile.ranks for layer in rank.layers}
    yield from _compare("layers", len(layers), len(model.numbers))
    planned = [[list(chunk.layers) for chunk in chunks] for chunks in list_chunks(model, parallelism)]
    for rank, chunks in zip(profile.ranks, planned, strict=False):
        measured = [[layer.number for layer in chunk.layers] for chunk in rank.chunks]
        yield from _compare(f"on pipeline rank {rank.rank} layers", measured, chunks)
    for number in model.numbers:
        if number in layers:
            kind = "moe" if model.has_experts(number) else "dense"
            # A profile gives each layer its own kind: `moe (layer 3)`.
            yield from _compare(f"as layer {number} one of kind", layers[number].kind.split(" ")[0], kind)


def _compare_flags(profile: Profile, path: Path, planned: PlannedTraining) -> Iterator[_Difference]:
    if profile.training is None:
        return
    with _no_warnings():
        model, parallelism = read_model(profile.training.flags, source=f"profile {path}", num_gpus=profile.training.world_size)
    # Parallel sizes first: others follow from them, such as the padded vocabulary.
    yield from _compare_fields("", parallelism, planned.parallelism)
    yield from _compare_fields("", model, planned.model)
    assumptions = _read_assumptions(profile, path, planned)
    yield from _compare_fields("", assumptions.state, planned.assumptions.state)
    yield from _compare_fields("", assumptions.execution, planned.assumptions.execution)


def _read_assumptions(profile: Profile, path: Path, planned: PlannedTraining) -> Assumptions:
    """Return the assumptions of the measured training, with the planned optimizer."""
    flags = () if profile.training is None else profile.training.flags
    with _no_warnings():
        return read_assumptions(flags, source=f"profile {path}", has_optimizer=planned.has_optimizer is not False)


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
        else:
            yield from _compare(f"{prefix}{field.name}", one, other)


def _compare(what: str, measured: object, planned: object) -> Iterator[_Difference]:
    if measured != planned:
        yield _Difference(what, measured, planned)


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
