"""Makes the layers of a profile take what the plain step took: the same training with nothing measured in it.

[Note: What the host adds]
A profile times forward while hooks run, and of layers that are alike the least of each stretch counts. So a simulated step can
be shorter than the plain one, where the host launches forward too late without hooks too, or longer, where the hooks delayed
all layers. Either is the host's, and forward's: the host waits for the routing of each layer of experts and begins anew from
there, while backward waits for nothing and is launched ahead of the device. What was too much is taken off the parts of forward
in which they can have been delayed.

What is missing comes on top of the step, and not of forward. The host is late in some steps, here and there, and in others it
is not: a peak of many steps is one of forward at the device's pace, in which copies are furthest behind. Measured on an H200,
where the plain step took 27 ms of 554 more: with these in forward four peaks are predicted 2.1% to 3.6% too low, and without
within 0.8%.

[Note: What a device without pauses adds]
Where no layer lets the host wait it is far ahead, and what is missing is the device's own: a profile stalls it before each
stretch of forward, and a device at its power limit is faster after a pause. So all of a microbatch takes longer alike, what
runs again too. Measured on an H100, a step of the 28 layers of `llama3_8b_layers` took 1308 ms under measurement and 1372
plain, where an H200 took 1352 and 1364; another H100 ran plain steps of it at its power limit. Where layers let the host wait
devices are at that limit too, but a profile does not tell the two apart: it counts as the host's.

A recompute keeps the time that was measured of forward. It is launched from backward, beside autograd, and what two trainings
took on one H200 says so: predicted 692 ms where 688 were measured, and 713 with the forward of the plain step; of one that is
bound by launches, 1161 ms where 1109 were measured, and 971 with the forward of the plain step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel

LEAST_FORWARD_PART = 1 / 3
"""Of a stretch's backward: what a device needs for its forward at least, unless less was measured. Hooks hardly lengthen
backward. That of a matrix product takes twice as long as its forward, that of fused attention 2.5 to 2.7 times (0.57 and 1.54
ms on an H200)."""


class Calibrated(NamedTuple):
    """Chunks of a rank, and what a microbatch takes longer than they do."""

    chunks: list[ChunkModel]
    """With forward passes at the device's pace."""
    late_s: float
    """Seconds of a microbatch in which the device waits for a late host."""


def calibrate(chunks: Sequence[ChunkModel], *, microbatch_s: float) -> Calibrated:
    """Return `chunks` with forward passes, and seconds beside them, with which a microbatch takes `microbatch_s`.

    Forward is not made shorter than what the device needs for it, so that a microbatch can still take longer.

    Args:
        chunks: All of a rank that waits for no other.
        microbatch_s: Seconds of one microbatch through all of them, forward and backward.
    """
    layers = [layer.model for chunk in chunks for layer in chunk.layers]
    edges = [segment for chunk in chunks for segment in (*chunk.first, *chunk.last)]
    simulated_s = sum(segment.forward_pass_s + segment.backward_s for segment in edges)
    simulated_s += sum(segment.forward_pass_s + segment.backward_s for layer in layers for segment in layer.segments)
    missing_s = microbatch_s - simulated_s
    if missing_s >= 0:
        if simulated_s > 0 and not any(segment.host_wait for layer in layers for segment in layer.segments):
            return Calibrated(_lengthen(chunks, by=microbatch_s / simulated_s), 0.0)
        return Calibrated(list(chunks), missing_s)
    spare_s = sum(_find_spare_s(segment) for layer in layers for segment in layer.segments)
    part = min(1.0, -missing_s / spare_s) if spare_s else 0.0
    kinds = {layer: _take_off(layer, part) for layer in layers}
    return Calibrated([_replace_models(chunk, kinds) for chunk in chunks], 0.0)


def _replace_models(chunk: ChunkModel, kinds: Mapping[LayerModel, LayerModel]) -> ChunkModel:
    layers = tuple(dataclasses.replace(layer, model=kinds[layer.model]) for layer in chunk.layers)
    return dataclasses.replace(chunk, layers=layers)


def _lengthen(chunks: Sequence[ChunkModel], *, by: float) -> list[ChunkModel]:
    """Return `chunks` whose compute takes `by` times as long. See [Note: What a device without pauses adds]."""

    def lengthen(segments: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(dataclasses.replace(one, forward_s=one.forward_s * by, backward_s=one.backward_s * by) for one in segments)

    # Once for each kind, so that layers of one kind stay one.
    kinds = {
        model: dataclasses.replace(
            model,
            segments=lengthen(model.segments),
            units=tuple(dataclasses.replace(unit, extra_s=unit.extra_s * by, copy_s=unit.copy_s * by) for unit in model.units),
        )
        for model in {layer.model for chunk in chunks for layer in chunk.layers}
    }
    return [
        dataclasses.replace(_replace_models(chunk, kinds), first=lengthen(chunk.first), last=lengthen(chunk.last))
        for chunk in chunks
    ]


def _take_off(layer: LayerModel, part: float) -> LayerModel:
    """Return `layer` without that part of what each stretch's forward has to spare."""
    segments = (
        dataclasses.replace(segment, forward_host_s=segment.forward_host_s - part * _find_spare_s(segment))
        for segment in layer.segments
    )
    return dataclasses.replace(layer, segments=tuple(segments))


def _find_spare_s(segment: Segment) -> float:
    """Return the seconds of a stretch's forward that may be the host's."""
    return max(0.0, segment.forward_pass_s - LEAST_FORWARD_PART * segment.backward_s)
