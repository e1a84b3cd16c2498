"""Layers with small numbers for hand calculations, for tests of the planner."""

from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment, UnitModel

SEGMENT_NAMES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "router", "dispatch"),
    *("shared_expert", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"),
)
"""Segments of a layer with experts, in forward order: `dispatch` has index 6 and `moe_combine` 11."""


def save(name, *tags, size_bytes, is_same_in_all_layers=False):
    return SavedTensor(
        name=name, tags=tags, size_bytes=size_bytes, is_same_in_all_layers=is_same_in_all_layers, element_bytes=1
    )


TENSORS = (
    save("layer input", "layer_input", "attn_norm", size_bytes=100),
    save("rotary", "layer_input", size_bytes=7, is_same_in_all_layers=True),
    save("normed", "qkv_linear", size_bytes=110),
    save("query, key and value", "core_attn", size_bytes=300),
    save("attention output", "core_attn", "attn_proj", size_bytes=130),
    save("log-sum-exp", "core_attn", size_bytes=5),
    save("residual", "mlp_norm", size_bytes=140),
    save("normed residual", "shared_expert", "router", size_bytes=150),
    save("scores", "router", size_bytes=20),
    save("shared expert activations", "shared_expert", size_bytes=160),
    save("permuted tokens", "expert_fc1", size_bytes=400),
    save("gate and up", "moe_act", size_bytes=600),
    save("activated", "expert_fc2", size_bytes=350),
    save("indices", "moe_combine", size_bytes=30),
)
UNITS = (
    UnitModel(
        name="layer",
        segments=SEGMENT_NAMES,
        drops=tuple(tensor.name for tensor in TENSORS if "layer_input" not in tensor.tags),
        before="moe_combine",
    ),
    UnitModel(name="attn_norm", segments=("attn_norm",), drops=("normed",), before="qkv_linear"),
    UnitModel(name="core_attn", segments=("core_attn",), drops=("log-sum-exp",), before="core_attn"),
    UnitModel(name="mlp_norm", segments=("mlp_norm",), drops=("normed residual",), before="shared_expert", extra_bytes=9),
    UnitModel(
        name="moe",
        segments=SEGMENT_NAMES[5:],
        drops=tuple(tensor.name for tensor in TENSORS[7:]),
        keeps=(save("normed residual", "moe", size_bytes=150),),
        before="moe_combine",
    ),
    UnitModel(name="moe_act", segments=("moe_act",), drops=("activated",), before="expert_fc2", extra_s=0.25),
)


def make_moe_layer(*, host_wait=None):
    """Return a layer with experts: 1 s of forward and 2 s of backward per segment; `dispatch` has the host wait."""
    segments = tuple(
        Segment(name=name, forward_s=1.0, backward_s=2.0, host_wait=host_wait if name == "dispatch" else None)
        for name in SEGMENT_NAMES
    )
    return LayerModel(kind="moe", segments=segments, tensors=TENSORS, units=UNITS)


WITH_HOLD_WAIT = make_moe_layer(host_wait=HostWait.HOLD)
PLAIN = make_moe_layer()
