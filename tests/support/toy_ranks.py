"""Ranks small enough to try all plans: a few layers with four sites each, and small whole numbers of bytes and seconds."""

from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, LinkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.transfer_schedule import TransferPolicy

NAMES = ("core_attn", "expert_fc1", "moe_act", "expert_fc2")


def make_toy_layer(*, kind="toy", sizes=(1, 8, 6, 4, 2), forward_s=(4.0, 3.0, 1.0, 2.0), extra_bytes=0):
    """Return a layer that saves its input and one tensor in each of four segments, with `sizes` in this order."""
    layer_input, attention, permuted, gate, activation = sizes
    return LayerModel(
        kind=kind,
        segments=tuple(
            Segment(name=name, forward_s=seconds, backward_s=2 * seconds, backward_extra_bytes=extra_bytes)
            for name, seconds in zip(NAMES, forward_s, strict=True)
        ),
        tensors=(
            SavedTensor(name="layer input", tags=("layer_input",), size_bytes=layer_input, element_bytes=1),
            SavedTensor(name="query, key and value", tags=("core_attn",), size_bytes=attention, element_bytes=1),
            SavedTensor(name="permuted tokens", tags=("expert_fc1",), size_bytes=permuted, element_bytes=1),
            SavedTensor(name="first linears' output", tags=("moe_act",), size_bytes=gate, element_bytes=1),
            SavedTensor(name="activation's output", tags=("expert_fc2",), size_bytes=activation, element_bytes=1),
        ),
        units=(
            UnitModel(
                name="layer",
                segments=NAMES,
                drops=("query, key and value", "permuted tokens", "first linears' output", "activation's output"),
                before="expert_fc2",
            ),
            UnitModel(name="moe_act", segments=("moe_act",), drops=("activation's output",), before="expert_fc2"),
        ),
    )


def make_toy_rank(
    *,
    layers=None,
    pipeline=None,
    rank=0,
    first_number=0,
    static_bytes=0,
    link=None,
    policy=None,
    min_offloaded_numel=1,
    host_budget_bytes=None,
):
    """Return a rank with one chunk for each sequence of layers in `layers`."""
    layers = [[make_toy_layer()] * 2] if layers is None else layers
    pipeline = Pipeline(stages=2, microbatches=3) if pipeline is None else pipeline
    chunks, number = [], first_number
    for models in layers:
        numbered = []
        for model in models:
            numbered.append(NumberedLayer(number=number, model=model))
            number += 1
        chunks.append(ChunkModel(layers=tuple(numbered)))
    return RankModel(
        rank=rank,
        static_bytes=static_bytes,
        chunks=tuple(chunks),
        passes=list_passes(pipeline, rank=rank),
        link=link or LinkModel(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, duplex_bytes_per_s=0.75),
        policy=policy or TransferPolicy(window_bytes=8, prefetch_bytes=8),
        min_offloaded_numel=min_offloaded_numel,
        host_budget_bytes=host_budget_bytes,
    )
