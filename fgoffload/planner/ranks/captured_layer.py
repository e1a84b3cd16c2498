"""Models layers with modules captured by CUDA graphs: no recompute, fixed inputs and outputs, and staging slots.

A graph runs no Python, so captured modules cannot be recomputed. The inputs and outputs of a graph stay on the GPU, at fixed
addresses. The engine offloads other tensors of captured modules through staging slots, which all layers share. Slots are static
memory. Each slot fits the tensors that the largest layer offloads from its graph. The simulation does not model a graph's
wait for a free slot, so it underestimates the step time if copies are slower than compute. A full-iteration graph copies
tensors without staging, like eager steps.

A step reserves more memory than predicted, because we do not count the memory of graph pools. A pool keeps the inputs and
outputs of its graphs, and other allocations cannot use its free fragments.
"""

import dataclasses
import functools
from collections.abc import Iterator

from fgoffload.cuda_graphs import FULL_ITERATION, TRANSFORMER_ENGINE, Graphs, find_captured, find_kept
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor
from fgoffload.planner.ranks.rank_model import HostPace, RankModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedLayer(LayerModel):
    """A kind of layer with captured modules."""

    staged: frozenset[str]  # names of saved tensors that are offloaded through a staging slot

    __hash__ = LayerModel.__hash__

    def is_staged(self, tensor: SavedTensor) -> bool:  # noqa: D102
        return tensor.name in self.staged


@functools.lru_cache(maxsize=256)
def capture_layer(layer: LayerModel, graphs: Graphs, *, has_shared_overlap: bool) -> LayerModel:
    """Return the model of `layer` when `graphs` capture it. A layer without captured modules is returned unchanged."""
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
        # The host cannot synchronize inside captured experts.
        segments=tuple(dataclasses.replace(one, host_wait=None) for one in layer.segments)
        if "expert_fc1" in captured
        else layer.segments,
        tensors=tuple(dataclasses.replace(one, stays=one.stays or one.name in staying) for one in layer.tensors),
        units=tuple(unit for unit in layer.units if unit.name not in captured),
        staged=frozenset(inside - staying),
    )


def capture_rank(rank: RankModel, graphs: Graphs, *, has_shared_overlap: bool) -> RankModel:
    """Convert `rank`, which models eager execution, to execution with `graphs`."""
    capture = functools.partial(capture_layer, graphs=graphs, has_shared_overlap=has_shared_overlap)
    chunks = tuple(chunk.replace_models(capture) for chunk in rank.chunks)
    pace = HostPace.STEP_AHEAD if graphs.impl == FULL_ITERATION else rank.host_pace
    return dataclasses.replace(rank, chunks=chunks, host_pace=pace)


def _list_fixed(layer: LayerModel, graphs: Graphs, captured: frozenset[str]) -> Iterator[SavedTensor]:
    """Yield the saved tensors that are inputs or outputs of a layer's graph: the first tensor of each tag that saves one."""
    tags = {tag for tensor in layer.tensors for tag in tensor.tags}
    is_half = bool(graphs.modules) and ("core_attn" in captured) != ("mlp_fc1" in captured)
    is_fixed = {
        "layer_input": "core_attn" in captured,
        "mlp_fc1": is_half and "mlp_norm" not in tags,  # the residual, if the norm is fused
        "router": "moe_router" in graphs.modules and "moe_preprocess" not in graphs.modules,  # the norm's output
    }
    for tag in is_fixed:
        yield from [tensor for tensor in layer.tensors if is_fixed[tag] and tag in tensor.tags][:1]
