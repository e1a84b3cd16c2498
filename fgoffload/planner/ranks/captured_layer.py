"""A layer of which CUDA graphs capture modules: what cannot run again, what stays, and what leaves through staging slots.

[Note: What a plan takes graphs for]
No Python runs in a graph, so no plan runs a captured module again. Inputs and outputs of a graph stay: they lie at fixed
addresses. What else a captured module saves leaves through the engine's staging slots, which all layers share. Slots count as
static memory, each as large as what the largest layer offloads from its graph. Nothing else of that is on the device between
graphs. That a graph waits for a slot is not simulated: where copies are slower than compute, a step takes longer than said.
A full iteration copies tensors from where they lie, as eager steps do.

What else a pool of graphs costs is not counted: it holds the inputs and outputs of each graph all the time, and nothing outside
can use its fragments. So a step reserves more memory than is predicted.
"""

import dataclasses
import functools
from collections.abc import Iterator

from fgoffload.captured_tags import FULL_ITERATION, TRANSFORMER_ENGINE, Graphs, find_captured, find_kept
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor
from fgoffload.planner.ranks.rank_model import HostPace, RankModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedLayer(LayerModel):
    """A kind of layer with modules that are captured."""

    staged: frozenset[str]
    """Names of saved tensors that leave through a staging slot."""

    __hash__ = LayerModel.__hash__

    def is_staged(self, tensor: SavedTensor) -> bool:  # noqa: D102
        return tensor.name in self.staged


@functools.lru_cache(maxsize=256)
def capture_layer(layer: LayerModel, graphs: Graphs, *, has_shared_overlap: bool) -> LayerModel:
    """Return `layer` as it runs with `graphs`: itself, where they capture nothing.

    Args:
        layer: As it runs eagerly.
        graphs: What is captured.
        has_shared_overlap: Whether shared experts run beside the exchange of tokens.
    """
    kind: dict[str, bool] = {
        "is_moe": any(segment.name == "router" for segment in layer.segments),
        "has_shared_overlap": has_shared_overlap,
    }
    captured = find_captured(graphs.impl, graphs.modules, **kind)
    if not captured:
        return layer
    kept = find_kept(graphs.impl, graphs.modules, **kind)
    fixed = {one.name for one in _list_fixed(layer, graphs, captured) if graphs.impl == TRANSFORMER_ENGINE}
    staying = frozenset(one.name for one in layer.tensors if one.name in fixed or kept.keys() >= set(one.tags))
    inside = {one.name for one in layer.tensors if graphs.impl == TRANSFORMER_ENGINE and not captured.isdisjoint(one.tags)}
    return CapturedLayer(
        kind=layer.kind,
        # A capture of the experts can hold no wait of the host.
        segments=tuple(dataclasses.replace(one, host_wait=None) for one in layer.segments)
        if "expert_fc1" in captured
        else layer.segments,
        tensors=tuple(dataclasses.replace(one, stays=one.stays or one.name in staying) for one in layer.tensors),
        units=tuple(unit for unit in layer.units if unit.name not in captured),
        staged=frozenset(inside - staying),
    )


def capture_rank(rank: RankModel, graphs: Graphs, *, has_shared_overlap: bool) -> RankModel:
    """Return `rank`, whose layers run eagerly, as it runs with `graphs`.

    Args:
        rank: By a profile.
        graphs: What is captured.
        has_shared_overlap: Whether shared experts run beside the exchange of tokens.
    """
    chunks = tuple(
        dataclasses.replace(
            chunk,
            layers=tuple(
                dataclasses.replace(one, model=capture_layer(one.model, graphs, has_shared_overlap=has_shared_overlap))
                for one in chunk.layers
            ),
        )
        for chunk in rank.chunks
    )
    pace = HostPace.STEP_AHEAD if graphs.impl == FULL_ITERATION else rank.host_pace
    return dataclasses.replace(rank, chunks=chunks, host_pace=pace)


def _list_fixed(layer: LayerModel, graphs: Graphs, captured: frozenset[str]) -> Iterator[SavedTensor]:
    """Yield the saved tensors that are inputs or outputs of the graph of a layer: of their tag they are the first."""
    tags = {tag for tensor in layer.tensors for tag in tensor.tags}
    is_half = bool(graphs.modules) and ("core_attn" in captured) != ("mlp_fc1" in captured)
    is_fixed = {
        "layer_input": "core_attn" in captured,
        "mlp_fc1": is_half and "mlp_norm" not in tags,  # the residual, where the norm is a part of the linear
        "router": "moe_router" in graphs.modules and "moe_preprocess" not in graphs.modules,  # the norm's output
    }
    for tag in is_fixed:
        yield from [tensor for tensor in layer.tensors if is_fixed[tag] and tag in tensor.tags][:1]
