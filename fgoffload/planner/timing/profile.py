"""Profile of a training run: link measurements, and the times and bytes of each layer on each pipeline rank.

`fgoffload profile` writes a profile, and `--offload-modules auto` measures one in the first step. A profile uses the types of
the simulator and the solver: each measured layer is a `LayerModel` of its own kind. `make_rank_model` merges similar layers:

    profile = Profile.load(Path("profile.json"))
    ranks = [make_rank_model(profile, rank=rank.rank) for rank in profile.ranks]
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.errors import ConfigError
from fgoffload.output_files import write_file
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, HostPace, NumberedLayer, RankModel, find_host_pace
from fgoffload.planner.ranks.schedule import Pipeline, find_turning_chunk, list_passes
from fgoffload.planner.timing.calibration import calibrate
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.json_fields import read_json_value, to_json_value
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.tags import default_tags
from fgoffload.text_files import parse_json, read_text_file
from fgoffload.transfer_schedule import TransferPolicy

FORMAT = 3
"""Version of the JSON that `Profile.to_json` writes. Increment it if older releases would misread new files."""

CPU = "CPU"
"""Device name of a CPU."""

DEFAULT_TOLERANCE = 0.1
"""Fraction by which backward times and saved bytes per tag may differ between layers of one kind. Times of one layer vary by a
few percent between microbatches. Bytes differ by more than this only if routing is far out of balance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """Measurements of one pipeline rank in a baseline step, which offloads nothing."""

    rank: int  # pipeline rank, from 0
    pipeline: Pipeline  # the schedule of the step
    chunks: tuple[ChunkModel, ...]
    """Chunks, in order of their numbers; each layer is its own kind. Times are medians over microbatches, bytes are maxima."""
    static_bytes: int  # device bytes of weights, gradients, optimizer and buffers
    peak_bytes: int | None = None  # peak device bytes of the step; None if the device, such as a CPU, does not report them
    step_s: float  # seconds from the start of the step to the start of the next, or to the end of the last step
    step_end_s: float = 0.0  # seconds of the step after the last pass: gradient reduction and optimizer
    min_offloaded_numel: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    """Minimum number of saved elements of a storage to offload, as configured in the run. Smaller storages stay on the GPU."""

    @property
    def layers(self) -> tuple[NumberedLayer, ...]:
        """Layers of all chunks, in order."""
        return tuple(layer for chunk in self.chunks for layer in chunk.layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """Identifies the profiled run. The planner rejects a profile of another run."""

    source: str  # argument file, as the user named it
    flags: tuple[str, ...]  # Megatron's flags: from the file, then from the command line, which take precedence
    world_size: int  # number of processes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of the link and, if a model was measured too, of its pipeline ranks."""

    device: str  # device name as the driver reports it, or `CPU`
    versions: Mapping[str, str]  # package versions, keyed by package name, such as torch
    date: str  # date of the measurement, such as `2026-11-22`
    link: LinkProfile  # link of one device, measured with no other traffic
    ranks: tuple[RankProfile, ...] = ()  # pipeline ranks, in order; empty if only the link was measured
    has_optimizer: bool = True
    """Whether the steps updated parameters. If so, `static_bytes` and `step_end_s` include the optimizer."""
    training: MeasuredTraining | None = None
    """The profiled run; None if only the link was measured, or if the run makes its own plan."""
    plain_step_s: float | None = None
    """Median seconds of a step without measurement hooks, on the slowest process. None if unknown."""
    compared_steps: tuple[ComparedStep, ...] = ()
    """Steps under plans, which show how much copies slow compute; empty if none were run, as on a CPU."""

    def __post_init__(self) -> None:
        if self.plain_step_s is not None and not 0 < self.plain_step_s < math.inf:
            raise ConfigError(f"plain_step_s {self.plain_step_s} is not a step time. Use a number of seconds above 0, or null.")

    def get_rank(self, rank: int) -> RankProfile:
        """Return the measurements of pipeline rank `rank`."""
        for one in self.ranks:
            if one.rank == rank:
                return one
        if not self.ranks:
            raise ConfigError(
                f"rank {rank} is not in the profile, which has only the link. Profile a model: fgoffload profile ARGUMENTS.sh."
            )
        raise ConfigError(f"rank {rank} is not in the profile. Use one of: {', '.join(str(one.rank) for one in self.ranks)}.")

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps({"format": FORMAT, **to_json_value(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "Profile":
        """Parse the output of `to_json`. Error messages name its `source`.

        Raises:
            ConfigError: `text` is not a profile of this format. The message names the faulty field.
        """
        document = parse_json(text, name=source, fix="Use a file that `fgoffload profile --json` wrote.")
        found = document.pop("format", None) if isinstance(document, dict) else None
        if type(found) is not int or found != FORMAT:
            raise ConfigError(f"{source} is a profile of format {found!r}; this version reads format {FORMAT}. Measure again.")
        return read_json_value(cls, document, source=source)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Load the profile in the file at `path`."""
        source = f"profile {path}"
        return cls.from_json(
            read_text_file(path, name=source, fix="Use a file that `fgoffload profile --json` wrote."), source=source
        )

    def save(self, path: Path) -> None:
        """Write the profile to the file at `path`."""
        try:
            write_file(path, self.to_json())
        except OSError as error:
            raise ConfigError(f"profile {path} cannot be written: {error.strerror}. Use another path.") from error


def make_rank_model(
    profile: Profile,
    *,
    rank: int,
    policy: TransferPolicy | None = None,
    microbatches: int | None = None,
    host_budget_bytes: int | None = None,
) -> RankModel:
    """Return the model of pipeline rank `rank` of a profile, for the simulator and the solver.

    With one stage, times are calibrated so that the simulated baseline matches the plain step, if the profile has one. With
    several stages they are not, because the plain step includes waits of unknown length between stages. Only `make_rank_models`
    uses compared steps. None means the default policy, the measured number of microbatches, and no host memory limit.
    """
    measured = profile.get_rank(rank)
    pipeline = measured.pipeline
    if microbatches is not None:
        pipeline = dataclasses.replace(pipeline, microbatches=microbatches)
    kinds = merge_alike([_keep_untagged(layer.model) for layer in measured.layers], tolerance=DEFAULT_TOLERANCE)
    chunks = [chunk.replace_models(lambda model: kinds[model.kind]) for chunk in measured.chunks]
    late_s = 0.0
    if profile.plain_step_s is not None and measured.pipeline.stages == 1:
        microbatches_s = profile.plain_step_s - measured.step_end_s
        chunks, late_s = calibrate(chunks, microbatch_s=microbatches_s / measured.pipeline.microbatches)
    return RankModel(
        rank=rank,
        static_bytes=measured.static_bytes,
        chunks=tuple(chunks),
        passes=list_passes(pipeline, rank=rank),
        link=profile.link.to_model(),
        policy=policy or TransferPolicy(),
        min_offloaded_numel=measured.min_offloaded_numel,
        step_end_s=measured.step_end_s + late_s * pipeline.microbatches,
        host_budget_bytes=host_budget_bytes,
        host_pace=HostPace.BESIDE if profile.device == CPU else find_host_pace(chunks, pipeline),
        turning_chunk=find_turning_chunk(pipeline, rank=rank),
    )


def merge_alike(layers: Sequence[LayerModel], *, tolerance: float) -> dict[str, LayerModel]:
    """Merge similar layers. Return the merged model of each layer, keyed by the layer's kind.

    Layers are similar if they have the same segments, tensors and units, and if backward times and saved bytes per tag are
    within `tolerance` of the first layer of the group. Backward times are averaged. Forward times are the minimum per segment,
    because launch delays only lengthen a segment: six identical layers took 9.9 to 13.9 ms in forward and 11.6 to 11.9 ms in
    backward on an H200. The tensors come from the layer with the most bytes, because a plan must fit that layer.
    """
    groups: list[list[LayerModel]] = []
    for layer in layers:
        group = next((group for group in groups if _is_alike(group[0], layer, tolerance)), None)
        if group is None:
            groups.append([layer])
        else:
            group.append(layer)
    return {layer.kind: merged for group in groups for merged in [_merge(group, join_forward=min)] for layer in group}


def merge_processes(profiles: Iterable[RankProfile]) -> tuple[RankProfile, ...]:
    """Merge the profiles of all data, tensor and expert parallel processes into one profile per pipeline rank.

    Times of segments are averaged, because processes wait for each other; bytes are maxima. If the tensors of a layer differ
    between processes, the layer with the most saved bytes is used. The ranks can be in any order. For bitwise
    identical results, keep the order of the processes within a rank.
    """
    by_rank: dict[int, list[RankProfile]] = {}
    for profile in profiles:
        by_rank.setdefault(profile.rank, []).append(profile)
    return tuple(_merge_process(by_rank[rank]) for rank in sorted(by_rank))


def _merge_process(profiles: Sequence[RankProfile]) -> RankProfile:
    peaks = [profile.peak_bytes for profile in profiles if profile.peak_bytes is not None]
    return dataclasses.replace(
        profiles[0],
        chunks=tuple(_merge_chunks(alike) for alike in zip(*(profile.chunks for profile in profiles), strict=True)),
        static_bytes=max(profile.static_bytes for profile in profiles),
        peak_bytes=max(peaks, default=None),
        step_s=max(profile.step_s for profile in profiles),
        step_end_s=max(profile.step_end_s for profile in profiles),
    )


def _merge_chunks(alike: Sequence[ChunkModel]) -> ChunkModel:
    layers = []
    for same in zip(*(chunk.layers for chunk in alike), strict=True):
        models = [layer.model for layer in same]
        if any(_list_structure(model) != _list_structure(models[0]) for model in models):
            models = [max(models, key=lambda model: model.saved_bytes)]
        layers.append(dataclasses.replace(same[0], model=_merge(models, join_forward=statistics.fmean)))
    return dataclasses.replace(alike[0], layers=tuple(layers), saved_bytes=max(chunk.saved_bytes for chunk in alike))


def _is_alike(first: LayerModel, other: LayerModel, tolerance: float) -> bool:
    if _list_structure(first) != _list_structure(other):
        return False
    pairs: list[tuple[float, float]] = [(first.backward_s, other.backward_s)]
    # Compare sums per tag, not tensors: each expert saves its own tensor, and token counts per expert vary more than their sum.
    pairs += zip(_count_by_tags(first).values(), _count_by_tags(other).values(), strict=True)
    return all(abs(one - another) <= tolerance * max(one, another) for one, another in pairs)


def _keep_untagged(layer: LayerModel) -> LayerModel:
    """Keep tensors outside all tagged modules on the GPU, because no plan can select them."""
    names = frozenset(default_tags().names)
    tensors = [dataclasses.replace(one, stays=one.stays or names.isdisjoint(one.tags)) for one in layer.tensors]
    return dataclasses.replace(layer, tensors=tuple(tensors))


def _list_structure(layer: LayerModel) -> object:
    """Return the properties that all layers of one kind share: everything except times and sizes."""
    segments = [(segment.name, segment.host_wait) for segment in layer.segments]
    tensors = [(tensor.name, tensor.tags, tensor.is_same_in_all_layers) for tensor in _list_tensors(layer)]
    units = [(unit.name, unit.segments, unit.drops, unit.before) for unit in layer.units]
    return segments, tensors, units


def _list_tensors(layer: LayerModel) -> list[SavedTensor]:
    return [*layer.tensors, *(tensor for unit in layer.units for tensor in unit.keeps)]


def _count_by_tags(layer: LayerModel) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for tensor in _list_tensors(layer):
        found[tensor.tags] = found.get(tensor.tags, 0) + tensor.size_bytes
    return found


def _merge(group: Sequence[LayerModel], *, join_forward: Callable[[Iterable[float]], float]) -> LayerModel:
    first, largest = group[0], max(group, key=lambda layer: layer.saved_bytes)
    segments = tuple(_merge_segments(alike, join_forward) for alike in zip(*(layer.segments for layer in group), strict=True))
    return LayerModel(kind=first.kind, segments=segments, tensors=largest.tensors, units=largest.units)


def _merge_segments(alike: Sequence[Segment], join_forward: Callable[[Iterable[float]], float]) -> Segment:
    return dataclasses.replace(
        alike[0],
        forward_s=join_forward(segment.forward_s for segment in alike),
        backward_s=statistics.fmean(segment.backward_s for segment in alike),
        forward_extra_bytes=max(segment.forward_extra_bytes for segment in alike),
        backward_extra_bytes=max(segment.backward_extra_bytes for segment in alike),
    )
