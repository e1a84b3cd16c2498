"""Calibrates profiled layers against the plain step, which runs without measurement hooks.

[Note: Launch delays]
A profile measures forward with hooks, and takes each segment's minimum over similar layers. The simulated step is too
short if forward is launch-bound even without hooks, and too long if the hooks delayed every layer. Both errors are in forward,
where the host synchronizes on each MoE layer's token counts. In backward the host runs ahead of the device. If the simulated
step is too long, we shorten the forward segments that hooks may have delayed.

If the step is too short, we add the missing time to the step, not to forward. Only some steps are launch-bound, so the peak
over many steps occurs when forward runs at the device's pace and copies are furthest behind. With the missing time in forward,
predicted peaks of W2 on an H200 would be up to 3.6% too low. Our predictions are within 0.8%.

[Note: Power limit]
If no layer synchronizes, the host runs far ahead, so the missing time is device time. A profile stalls the device before each
forward segment, and a device at its power limit runs faster after a pause: 5% faster for Llama 3 8B on an H100. So we scale all
compute of a microbatch, recompute included, by one factor. A device can also reach its power limit if layers synchronize, but a
profile cannot separate the two effects, so we attribute both to the host.

When we shorten forward, a recompute keeps the measured time, because the host launches it together with backward.
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel

LEAST_FORWARD_PART = 1 / 3
"""Minimum device time of a segment's forward, as a fraction of its backward time, unless the measured time is lower. Hooks
hardly lengthen backward. Without hooks, backward takes twice as long as forward for a matrix product, and 2.7 times as long for
fused attention (measured on an H200)."""


def calibrate(chunks: Sequence[ChunkModel], *, microbatch_s: float) -> tuple[list[ChunkModel], float]:
    """Adjust `chunks` so that a microbatch takes `microbatch_s`. Also return the launch delay to add per microbatch.

    Forward keeps at least its estimated device time, so a microbatch can still take longer than `microbatch_s`.
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
    kinds = {layer: _shorten_forward(layer, part) for layer in layers}
    return [chunk.replace_models(kinds.__getitem__) for chunk in chunks], 0.0


def _lengthen(chunks: Sequence[ChunkModel], *, by: float) -> list[ChunkModel]:
    """Scale all compute times of `chunks` by the factor `by`. See [Note: Power limit]."""

    def lengthen(segments: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(dataclasses.replace(one, forward_s=one.forward_s * by, backward_s=one.backward_s * by) for one in segments)

    # Replace each kind once, so that layers of one kind still share a model.
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


def _shorten_forward(layer: LayerModel, part: float) -> LayerModel:
    segments = (
        dataclasses.replace(segment, forward_host_s=segment.forward_host_s - part * _find_spare_s(segment))
        for segment in layer.segments
    )
    return dataclasses.replace(layer, segments=tuple(segments))


def _find_spare_s(segment: Segment) -> float:
    return max(0.0, segment.forward_pass_s - LEAST_FORWARD_PART * segment.backward_s)
