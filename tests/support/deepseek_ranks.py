"""DeepSeek-V3 on 16 stages, interleaved, as the planner sees it: real shapes, made-up times.

Times are those of 450 TFLOP/s, 12.5 ms a layer, spread over its stretches by hand. Bytes are those of `list_saved_tensors`.
Units are written down here, so that tests of the solver need no other part of the planner.
"""

import functools

from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape
from fgoffload.planner.ranks.layer_model import LayerModel, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, LinkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.policy import TransferPolicy
from fgoffload.units import GIB

LINK = LinkModel(d2h_bytes_per_s=50e9, h2d_bytes_per_s=50e9, duplex_bytes_per_s=40e9, compute_slowdown=0.02)

ATTENTION_MS = {"attn_norm": 0.05, "qkv_linear": 1.4, "core_attn": 2.8, "attn_proj": 1.1, "mlp_norm": 0.05}
EXPERTS_MS = {
    "router": 0.3,
    "dispatch": 1.2,
    "shared_expert": 0.6,
    "expert_fc1": 2.6,
    "moe_act": 0.35,
    "expert_fc2": 1.3,
    "moe_combine": 0.8,
}
DENSE_MS = {"mlp_fc1": 3.0, "mlp_act": 0.2, "mlp_fc2": 1.5}


def make_shape(*, experts):
    return LayerShape(
        micro_batch_size=1,
        seq_length=4096,
        hidden_size=7168,
        num_attention_heads=128,
        num_query_groups=128,
        qk_channels=192,
        v_channels=128,
        ffn_hidden_size=0 if experts else 18432,
        experts=ExpertsShape(
            num_experts=256,
            topk=8,
            ffn_hidden_size=2048,
            shared_ffn_hidden_size=2048,
            expert_parallel_size=64,
            has_fused_permutation=True,
            router=RouterShape(score_function="sigmoid", has_expert_bias=True, balancing="seq_aux_loss", dtype_bytes=4),
        )
        if experts
        else None,
        latent=LatentShape(q_lora_rank=1536, kv_lora_rank=512, qk_pos_emb_head_dim=64, has_qk_norm=True),
    )


@functools.cache
def make_layer(kind):
    times_ms = {**ATTENTION_MS, **(EXPERTS_MS if kind == "moe" else DENSE_MS)}
    if kind != "moe":
        del times_ms["mlp_norm"]
    segments = tuple(
        Segment(name=name, forward_s=ms * 1e-3, backward_s=2 * ms * 1e-3, backward_extra_bytes=300 * 10**6)
        for name, ms in times_ms.items()
    )
    tensors = list_saved_tensors(make_shape(experts=kind == "moe"))
    return LayerModel(kind=kind, segments=segments, tensors=tensors, units=make_units(kind, segments, tensors))


def make_units(kind, segments, tensors):
    def drop(*tags, but=()):
        return tuple(tensor.name for tensor in tensors if set(tags) & set(tensor.tags) and not set(but) & set(tensor.tags))

    names = tuple(segment.name for segment in segments)
    units = [
        UnitModel(
            name="layer", segments=names, drops=drop(*(set(names) - {"layer_input"}), but=("layer_input",)), before=names[-1]
        ),
        UnitModel(
            name="attn_norm", segments=("attn_norm",), drops=("output of the norm before attention",), before="qkv_linear"
        ),
        UnitModel(name="mla_up_proj", segments=("qkv_linear",), drops=("query, key and value",), before="core_attn"),
        UnitModel(name="core_attn", segments=("core_attn",), drops=("log-sum-exp", "random state"), before="core_attn"),
    ]
    if kind != "moe":
        return (*units, UnitModel(name="mlp", segments=names[-3:], drops=drop(*names[-3:], but=("x",)), before="mlp_fc2"))
    norm = "output of the norm before the MLP"
    inside = drop("shared_expert", "router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine")
    return (
        *units,
        UnitModel(name="mlp_norm", segments=("mlp_norm",), drops=(norm,), before="router"),
        UnitModel(name="moe", segments=names[5:], drops=tuple(name for name in inside if name != norm), before="moe_combine"),
        UnitModel(
            name="shared_expert",
            segments=("shared_expert",),
            drops=("inside of the shared experts",),
            before="shared_expert",
        ),
        UnitModel(name="moe_act", segments=("moe_act",), drops=("activation's output",), before="expert_fc2"),
    )


def make_ranks(*, stages=16, chunks=2, layers=61, microbatches=64, static_bytes=30 * GIB):
    """Return the ranks of DeepSeek-V3: 3 dense layers and then experts, as evenly as it goes, over `stages * chunks` chunks."""
    pipeline = Pipeline(stages=stages, chunks=chunks, microbatches=microbatches)
    pieces = stages * chunks
    bounds = [round(piece * layers / pieces) for piece in range(pieces + 1)]
    numbered = [NumberedLayer(number=number, model=make_layer("dense" if number < 3 else "moe")) for number in range(layers)]
    ranks = []
    for rank in range(stages):
        own = []
        for chunk in range(chunks):
            piece = chunk * stages + rank
            head = (Segment(name="output", forward_s=4e-3, backward_s=8e-3, backward_extra_bytes=4 * 10**9),)
            own.append(
                ChunkModel(layers=tuple(numbered[bounds[piece] : bounds[piece + 1]]), last=head if piece == pieces - 1 else ())
            )
        ranks.append(
            RankModel(
                rank=rank,
                static_bytes=static_bytes,
                chunks=tuple(own),
                passes=list_passes(pipeline, rank=rank),
                link=LINK,
                policy=TransferPolicy(),
            )
        )
    return tuple(ranks)
