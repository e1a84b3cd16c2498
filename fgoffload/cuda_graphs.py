"""Determines which tags and recompute units of a Megatron layer are captured in CUDA graphs.

Source: `TransformerLayer._te_cuda_graph_capture`, `TransformerLayer.create_mcore_cudagraph_manager`, `MoETransformerLayer` and
`MoELayer.forward` in megatron-core 0.19.2.
"""

from collections.abc import Collection
from typing import NamedTuple

from fgoffload.tags import RECOMPUTE_UNITS, default_tags

NO_GRAPHS, LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION = "none", "local", "transformer_engine", "full_iteration"
GRAPH_IMPLS = (NO_GRAPHS, LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION)
"""Values of `--cuda-graph-impl`: no graphs, Megatron's layer graphs, Transformer Engine's layer graphs, one graph per step."""


class Graphs(NamedTuple):
    """CUDA graph options of a training run."""

    impl: str = NO_GRAPHS
    """Value of `--cuda-graph-impl`, one of `GRAPH_IMPLS`."""
    modules: tuple[str, ...] = ()
    """Values of `--cuda-graph-modules` in megatron-core 0.19. An empty tuple captures the whole layer."""


NO_CAPTURE = Graphs()

_ATTENTION = ("attn_norm", "qkv_linear", "gdp_qkv", "mla_up_proj", "core_attn", "attn_proj")
_DENSE = ("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2")
_BEFORE_EXPERTS = ("mlp_norm", "shared_expert", "router")
_EXPERTS = ("dispatch", "expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine")

_CAPTURED_IN_DENSE_LAYERS = {"attn": _ATTENTION, "mlp": _DENSE}
_CAPTURED_IN_MOE_LAYERS = {
    "attn": _ATTENTION,
    "moe": (*_BEFORE_EXPERTS, *_EXPERTS),
    "moe_router": _BEFORE_EXPERTS,
    "moe_preprocess": ("dispatch",),  # permutes the tokens before the all-to-all
}
"""Captured tags and units, keyed by the value of `--cuda-graph-modules`."""

_WHOLE_LAYERS = ("layer", "layer_input")
"""Unit and tag of full-layer recompute. A replay does not run the layer's Python code, so the layer cannot be recomputed."""


def find_captured(impl: str, modules: Collection[str], *, is_moe: bool, has_shared_overlap: bool = False) -> frozenset[str]:
    """Return the tags and units of a layer that overlap a captured module. See `Graphs` for `impl` and `modules`.

    `is_moe` means that the layer has experts. `has_shared_overlap` means that shared experts run during the all-to-all.
    """
    if impl == NO_GRAPHS:
        return frozenset()
    inside = _find_inside(impl, modules, is_moe=is_moe)
    if has_shared_overlap and "expert_fc1" not in inside:
        inside -= {"shared_expert"}
    overlapping = {unit.name for unit in RECOMPUTE_UNITS if inside & {unit.name, *unit.covers, *unit.reads}}
    return frozenset(inside | overlapping | set(_WHOLE_LAYERS))


def find_kept(impl: str, modules: Collection[str], *, is_moe: bool, has_shared_overlap: bool = False) -> dict[str, str]:
    """Return the tags that cannot be offloaded because of the layer's graphs, mapped to the reasons. See `find_captured`."""
    captured = find_captured(impl, modules, is_moe=is_moe, has_shared_overlap=has_shared_overlap)
    kept: dict[str, str] = {}
    if not captured:
        return kept
    if "moe" in modules:
        kept |= dict.fromkeys(default_tags().names, "Megatron-Core offloads nothing in the layer if moe is captured")
    if impl == LOCAL:
        kept |= {tag: "local graphs capture no copies" for tag in default_tags().names if tag in captured}
        kept |= {tag: "local graphs support only the experts' tags" for tag in default_tags().names if tag not in _EXPERTS}
    if impl == TRANSFORMER_ENGINE and "attn_norm" in captured:
        kept["attn_norm"] = "the tag saves a graph's input, whose address is fixed"
    is_edge = not {"attn", "moe_router"}.isdisjoint(modules) if is_moe else len({"attn", "mlp"}.intersection(modules)) == 1
    if impl == TRANSFORMER_ENGINE and is_edge:
        kept["mlp_norm"] = "the tag saves a graph's input or output, whose address is fixed"
    return kept | {"layer_input": "a captured layer cannot be recomputed as a whole"}


def _find_inside(impl: str, modules: Collection[str], *, is_moe: bool) -> set[str]:
    # With local graphs, Megatron captures a whole dense layer if any of its modules is listed.
    is_whole = not modules or (impl == LOCAL and not is_moe and not {"attn", "mlp"}.isdisjoint(modules))
    if impl == FULL_ITERATION or is_whole:
        return {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)}
    by_module = _CAPTURED_IN_MOE_LAYERS if is_moe else _CAPTURED_IN_DENSE_LAYERS
    inside = {name for module in modules for name in by_module.get(module, ())}
    if impl == LOCAL and is_moe and not {"moe_router", "moe_preprocess"}.isdisjoint(modules):
        # If either is listed, Megatron captures both, and also the ops after the all-to-all that returns expert outputs.
        inside |= {*_BEFORE_EXPERTS, "dispatch", "moe_combine"}
    return inside
