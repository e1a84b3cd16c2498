"""Builds the planner's layer models from the runs that a measured step recorded."""

import dataclasses
import statistics
from collections.abc import Collection, Sequence

from fgoffload.integrations.megatron.profile.measured_recomputes import UnitBuilder
from fgoffload.integrations.megatron.profile.measured_units import LAYER_INPUT, LayerFacts
from fgoffload.integrations.megatron.profile.recorder import LAST, STALLED_MICROBATCHES, StepRecorder
from fgoffload.integrations.megatron.profile.step_records import Run, Span
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.timing.profile import DEFAULT_TOLERANCE


class _Storages:
    """Assigns each saved storage of a chunk to the runs that count its bytes."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._microbatches: dict[int, set[int]] = {}
        self._owners: dict[tuple[int, int], Run] = {}
        numbers: dict[int, set[int]] = {}
        for run in runs:
            for key in run.saved:
                self._microbatches.setdefault(key, set()).add(run.microbatch)
                self._owners.setdefault((key, run.microbatch), run)
                numbers.setdefault(key, set()).add(run.number)
        layers = {run.number for run in runs if run.number >= 0}
        self._shared = {key for key, found in numbers.items() if len(layers) > 1 and layers <= found}

    def is_static(self, key: int) -> bool:
        """Return whether several microbatches saved the storage, as with a table that exists throughout training."""
        return len(self._microbatches[key]) > 1

    def is_in_all_layers(self, key: int) -> bool:
        """Return whether all layers of the chunk saved the storage."""
        return key in self._shared

    def is_owned(self, key: int, run: Run) -> bool:
        """Return whether `run` counts the storage: it saved the storage first in its microbatch, or all layers save it."""
        return self.is_in_all_layers(key) or self._owners[key, run.microbatch] is run


def build_chunk(recorder: StepRecorder, chunk: int, facts: Sequence[LayerFacts]) -> ChunkModel:
    """Build the model of a chunk from its recorded microbatches. Every layer gets a kind of its own."""
    runs = [run for run in recorder.runs if run.chunk == chunk]
    storages = _Storages(runs)
    layers = []
    offloaded: set[int] = set()
    for one in facts:
        own = [run for run in runs if run.number == one.number]
        if own:
            model = _LayerBuilder(recorder, storages, own, one).build()
            layers.append(NumberedLayer(number=one.number, model=model))
            if all(run.is_offloaded for run in _list_timed(own)):
                offloaded.add(one.number)
    layers = [_borrow(layer, layers, offloaded) if layer.number in offloaded else layer for layer in layers]
    segments = _build_segments(recorder, [run for run in runs if run.number < 0])
    # Only one microbatch has logits at a time: the last pipeline stage runs backward right after each forward.
    last_bytes = _count_outer_bytes(runs, storages, is_last=True)
    last = tuple(_add_extra_bytes(segment, last_bytes) for segment in segments[1:])
    saved_bytes = _count_outer_bytes(runs, storages, is_last=False)
    return ChunkModel(layers=tuple(layers), first=segments[:1], last=last, saved_bytes=saved_bytes)


def _borrow(layer: NumberedLayer, layers: Sequence[NumberedLayer], offloaded: Collection[int]) -> NumberedLayer:
    """Return `layer`, which was offloaded while it was timed, with values from other layers of its kind.

    Copies affect its times, but a plan counts copies separately, so it gets the mean times of layers that were not offloaded,
    if any. Its temporary bytes are unknown, because the counters include bytes in flight, so it gets the maximum of its kind.
    """
    alike = [other for other in layers if _is_same_kind(other.model, layer.model)]
    stayed = [other for other in alike if other.number not in offloaded] or [layer]
    segments = tuple(
        dataclasses.replace(
            segment,
            forward_s=statistics.fmean(other.model.segments[index].forward_s for other in stayed),
            backward_s=statistics.fmean(other.model.segments[index].backward_s for other in stayed),
            forward_extra_bytes=max(other.model.segments[index].forward_extra_bytes for other in alike),
            backward_extra_bytes=max(other.model.segments[index].backward_extra_bytes for other in alike),
        )
        for index, segment in enumerate(layer.model.segments)
    )
    return dataclasses.replace(layer, model=dataclasses.replace(layer.model, segments=segments))


def _is_same_kind(first: LayerModel, other: LayerModel) -> bool:
    """Return whether two layers have the same segments and tags, and save about the same number of bytes. Times are ignored."""
    names = [[(segment.name, segment.host_wait) for segment in layer.segments] for layer in (first, other)]
    tags = [[tensor.tags for tensor in layer.tensors] for layer in (first, other)]
    least_bytes, most_bytes = sorted((first.saved_bytes, other.saved_bytes))
    return names[0] == names[1] and tags[0] == tags[1] and least_bytes >= (1 - DEFAULT_TOLERANCE) * most_bytes


def _count_outer_bytes(runs: Sequence[Run], storages: _Storages, *, is_last: bool) -> int:
    """Return the maximum bytes per microbatch that are saved outside layers, or in layers but still referenced elsewhere.

    If `is_last`, only storages saved after the layers are counted; otherwise, all other storages are.
    """
    found: dict[int, int] = {}
    for run in runs:
        size_bytes = sum(
            record.size_bytes
            for key, record in run.saved.items()
            if not storages.is_static(key)
            and storages.is_owned(key, run)
            and (run.number < 0 or record.is_held)
            and is_last == (run.number < 0 and next(iter(record.segments)) == LAST)
        )
        found[run.microbatch] = found.get(run.microbatch, 0) + size_bytes
    return max(found.values(), default=0)


def _add_extra_bytes(segment: Segment, size_bytes: int) -> Segment:
    return dataclasses.replace(
        segment,
        forward_extra_bytes=segment.forward_extra_bytes + size_bytes,
        backward_extra_bytes=segment.backward_extra_bytes + size_bytes,
    )


def _list_timed(runs: Sequence[Run]) -> Sequence[Run]:
    """Select the runs whose times count. `runs` belong to one layer, or to the code outside layers."""
    first = min((run.microbatch for run in runs), default=0)
    # The first microbatch is a warm-up, in which the recorder reads the memory counters.
    timed = [run for run in runs if run.microbatch > first] or runs
    timed = [run for run in timed if not run.is_offloaded] or timed
    # Later microbatches may be launch-bound.
    return [run for run in timed if run.microbatch < STALLED_MICROBATCHES] or timed


def _build_segments(
    recorder: StepRecorder, runs: Sequence[Run], wait: tuple[str, HostWait] | None = None
) -> tuple[Segment, ...]:
    """Build the segments of one layer, or of the code outside layers, with median times over `runs`."""
    timed = _list_timed(runs)

    def measure(spans: list[list[Span]]) -> float:
        return statistics.median(map(recorder.measure_seconds, spans)) if spans else 0.0

    segments = []
    for name in dict.fromkeys(name for run in runs for name in run.segments):
        records, timed_records = ([run.segments[name] for run in some if name in run.segments] for some in (runs, timed))
        segments.append(
            Segment(
                name=name,
                forward_s=measure([one.forward for one in timed_records]),
                backward_s=measure([one.backward for one in timed_records]),
                forward_extra_bytes=max(one.forward_extra_bytes for one in records),
                backward_extra_bytes=max(one.backward_extra_bytes for one in records),
                host_wait=wait[1] if wait is not None and wait[0] == name else None,
            )
        )
    return tuple(segments)


class _LayerBuilder:
    """Builds the model of one layer from its recorded microbatches."""

    def __init__(self, recorder: StepRecorder, storages: _Storages, runs: Sequence[Run], facts: LayerFacts) -> None:
        self._recorder = recorder
        self._storages = storages
        self._runs = runs
        self._facts = facts
        # Sequential experts without tokens save nothing, so use the run with the most saved tensors.
        self._run = max(runs, key=lambda run: len(run.saved))
        self._names = self._name_tensors(self._run)

    def build(self) -> LayerModel:
        kind = f"{self._facts.kind} (layer {self._facts.number})"
        # Which storages are packed for offload depends on the plan. So we add, to every segment, the memory for packing all of
        # them in forward and for unpacking them in backward.
        packed_bytes = sum(record.count_gathered_bytes() for record in self._run.saved.values() if record.tags)
        segments = tuple(
            _add_extra_bytes(segment, packed_bytes)
            for segment in _build_segments(self._recorder, self._runs, self._find_wait())
        )
        if self._facts.has_sequential_experts:
            segments = tuple(map(self._add_other_experts, segments))
        units = UnitBuilder(self._facts, self._run, self._names, self._storages.is_in_all_layers)
        return LayerModel(kind=kind, segments=segments, tensors=self._build_tensors(), units=units.build(segments))

    def _add_other_experts(self, segment: Segment) -> Segment:
        """Add the bytes that the other sequential experts still hold while backward is in the last expert's first linear."""
        if segment.name != "expert_fc1":
            return segment
        later = (one for one in self._build_tensors() if one.tags[:1] in (("moe_act",), ("expert_fc2",)))
        size_bytes = sum(one.size_bytes for one in later)
        return dataclasses.replace(segment, backward_extra_bytes=segment.backward_extra_bytes + size_bytes)

    def _name_tensors(self, run: Run) -> dict[int, str]:
        """Return names of saved tensors, keyed by storage key: the first segment that saves the tensor, and a number."""
        counts: dict[str, int] = {}
        names = {}
        for key, record in run.saved.items():
            if self._storages.is_static(key) or not self._storages.is_owned(key, run) or record.is_held:
                continue
            if key == run.input_key:
                names[key] = LAYER_INPUT
                continue
            segment = next(iter(record.segments))
            counts[segment] = counts.get(segment, 0) + 1
            names[key] = f"{segment} {counts[segment]}"
        return names

    def _build_tensors(self) -> tuple[SavedTensor, ...]:
        most: dict[str, int] = {}
        for run in self._runs:
            for key, name in self._name_tensors(run).items():
                most[name] = max(most.get(name, 0), run.saved[key].size_bytes)
        tensors = []
        for key, name in self._names.items():
            record = self._run.saved[key]
            # A tensor without a tag gets its first segment's name as a tag, which no flag can select.
            tags = tuple(record.tags) or tuple(record.segments)[:1]
            tensors.append(
                SavedTensor(
                    name=name,
                    # If the whole layer is recomputed, its input is offloaded as `layer_input`.
                    tags=("layer_input", *tags) if name == LAYER_INPUT else tags,
                    size_bytes=most[name],
                    is_same_in_all_layers=self._storages.is_in_all_layers(key),
                    element_bytes=record.element_bytes,
                )
            )
        return tuple(tensors)

    def _find_wait(self) -> tuple[str, HostWait] | None:
        if self._facts.wait is None:
            return None
        name = next((name for name in ("expert_fc1", "after router") if name in self._run.segments), None)
        return None if name is None else (name, self._facts.wait)
