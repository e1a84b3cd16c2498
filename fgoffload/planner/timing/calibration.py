"""Calibrates the layers of a profile by the plain step, in which nothing is measured.

[Note: What the host adds]
A profile times forward while hooks run, and takes the minimum of each segment over layers that are alike. So a simulated step
can be shorter than the plain one, if the host launches forward late without hooks too, or longer, if the hooks delayed all
layers. Both concern forward: the host waits for the routing of each layer of experts and continues from there, while backward
waits for nothing and is launched ahead of the device. Excess time is taken off the segments of forward that hooks can have
delayed.

Missing time is added to the step, not to forward. The host is late in some steps only: the peak over many steps is that of a
forward at the device's pace, with copies furthest behind. On an H200 the plain step took 27 ms of 554 more: with these in
forward four peaks are predicted 2.1% to 3.6% too low, without within 0.8%.

[Note: What a device without pauses adds]
Without waits in layers the host is far ahead, and missing time is the device's: a profile stalls it before each segment of
forward, and a device at its power limit is faster after a pause. So all of a microbatch takes longer by one factor, recompute
included. On an H100, a step of the 28 layers of `llama3_8b_layers` took 1308 ms under measurement and 1372
plain, where an H200 took 1352 and 1364; another H100 ran plain steps of it at its power limit. Devices whose layers
wait for the host are at that limit too, but a profile cannot tell the two apart and counts it as the host's.

A recompute keeps the measured forward time. It is launched from backward, beside autograd, and two trainings on one H200
confirm it: 692 ms predicted and 688 measured, 713 with the forward of the plain step; and for a launch-bound one 1161 ms
predicted and 1109 measured, 971 with the forward of the plain step.
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel

LEAST_FORWARD_PART = 1 / 3
"""Least device time of a segment's forward, as a part of its backward, unless less was measured. Hooks hardly lengthen
backward. The backward of a matrix product takes twice as long as its forward, that of fused attention 2.5 to 2.7 times (0.57
and 1.54 ms on an H200)."""


def calibrate(chunks: Sequence[ChunkModel], *, microbatch_s: float) -> tuple[list[ChunkModel], float]:
    """Return `chunks` with forward passes and extra seconds such that a microbatch takes `microbatch_s`.

    The extra ones are those of a microbatch in which the device waits for launches. Forward keeps at least the device's time,
    so a microbatch can still take longer.
    """
    layers = [layer.model for chunk in chunks for layer in chunk.layers]
    edges = [segment for chunk in chunks for segment in (*chunk.first, *chunk.last)]
    simulated_s = sum(segment.forward_pass_s + segment.backward_s for segment in edges)
    simulated_s += sum(segment.forward_pass_s + segment.backward_s for layer in layers for segment in layer.segments)
    missing_s = microbatch_s - simulated_s
    if missing_s >= 0:
        if simulated_s > 0 and not any(segment.host_wait for layer in layers for segment in layer.segments):
            return _lengthen(chunks, by=microbatch_s / simulated_s), 0.0
        return list(chunks), missing_s
    spare_s = sum(_find_spare_s(segment) for layer in layers for segment in layer.segments)
    part = min(1.0, -missing_s / spare_s) if spare_s else 0.0
    kinds = {layer: _take_off(layer, part) for layer in layers}
    return [chunk.replace_models(kinds.__getitem__) for chunk in chunks], 0.0


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
        dataclasses.replace(chunk.replace_models(kinds.__getitem__), first=lengthen(chunk.first), last=lengthen(chunk.last))
        for chunk in chunks
    ]


def _take_off(layer: LayerModel, part: float) -> LayerModel:
    """Return `layer` with each segment's forward shortened by `part` of its spare seconds."""
    segments = (
        dataclasses.replace(segment, forward_host_s=segment.forward_host_s - part * _find_spare_s(segment))
        for segment in layer.segments
    )
    return dataclasses.replace(layer, segments=tuple(segments))


def _find_spare_s(segment: Segment) -> float:
    """Return the seconds of a segment's forward that may be late launches."""
    return max(0.0, segment.forward_pass_s - LEAST_FORWARD_PART * segment.backward_s)
