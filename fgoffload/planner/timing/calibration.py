"""Makes the layers of a profile take what the plain step took: the same training with nothing measured in it.

[Note: What the host adds]
A profile times forward while hooks run, and of layers that are alike the least of each stretch counts. So a simulated step can
be shorter than the plain one, where the host launches forward too late without hooks too, or longer, where the hooks delayed
all layers. Either is the host's, and forward's: the host waits for the routing of each layer of experts and begins anew from
there, while backward waits for nothing and is launched ahead of the device. So forward passes take it, each layer the same of
what is missing, and of what is too much in the parts in which they can have been delayed.

A recompute keeps the time that was measured of forward. It is launched from backward, beside autograd, and what two trainings
took on one H200 says so: predicted 692 ms where 688 were measured, and 713 with the forward of the plain step; of one that is
bound by launches, 1161 ms where 1109 were measured, and 971 with the forward of the plain step.
"""

import dataclasses
from collections.abc import Callable, Sequence

from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel

LEAST_FORWARD_PART = 1 / 3
"""Of a stretch's backward: what a device needs for its forward at least, unless less was measured. Hooks hardly lengthen
backward. That of a matrix product takes twice as long as its forward, that of fused attention 2.5 to 2.7 times (0.57 and 1.54
ms on an H200)."""


def calibrate(chunks: Sequence[ChunkModel], *, microbatch_s: float) -> list[ChunkModel]:
    """Return `chunks` with forward passes with which a microbatch takes `microbatch_s`. See [Note: What the host adds].

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
    spare_s = sum(_find_spare_s(segment) for layer in layers for segment in layer.segments)

    def find_host_s(layer: LayerModel, segment: Segment) -> float:
        if missing_s < 0:
            return -min(1.0, -missing_s / spare_s) * _find_spare_s(segment) if spare_s else 0.0
        part = segment.forward_s / layer.forward_s if layer.forward_s else 1 / len(layer.segments)
        return part * missing_s / len(layers)

    kinds = {layer: _add_host(layer, find_host_s) for layer in layers}
    return [
        dataclasses.replace(chunk, layers=tuple(dataclasses.replace(layer, model=kinds[layer.model]) for layer in chunk.layers))
        for chunk in chunks
    ]


def _add_host(layer: LayerModel, find_host_s: Callable[[LayerModel, Segment], float]) -> LayerModel:
    segments = (
        dataclasses.replace(segment, forward_host_s=segment.forward_host_s + find_host_s(layer, segment))
        for segment in layer.segments
    )
    return dataclasses.replace(layer, segments=tuple(segments))


def _find_spare_s(segment: Segment) -> float:
    """Return the seconds of a stretch's forward that may be the host's."""
    return max(0.0, segment.forward_pass_s - LEAST_FORWARD_PART * segment.backward_s)
