"""Tests the tags and units that each captured module contains, and the tags that cannot be offloaded with it."""

import pytest

from fgoffload.cuda_graphs import FULL_ITERATION, LOCAL, NO_GRAPHS, TRANSFORMER_ENGINE, find_captured, find_kept
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

pytestmark = pytest.mark.quick

ATTENTION = {"attn_norm", "qkv_linear", "gdp_qkv", "mla_up_proj", "core_attn", "attn_proj"}
DENSE = {"mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"}
ROUTER = {"mlp_norm", "shared_expert", "router"}
EXPERTS = {"expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine"}
LAYER = {"layer", "layer_input"}
EVERYTHING = {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)}


@pytest.mark.parametrize(
    ("impl", "modules", "is_moe", "captured"),
    [
        (NO_GRAPHS, ["attn"], True, set()),
        (TRANSFORMER_ENGINE, ["attn"], True, ATTENTION | LAYER),
        (TRANSFORMER_ENGINE, ["attn", "mlp"], False, ATTENTION | DENSE | LAYER | {"mlp"}),
        (TRANSFORMER_ENGINE, ["attn", "mlp"], True, ATTENTION | LAYER),
        # The unit moe recomputes the router, and dispatch reads the router's input.
        (TRANSFORMER_ENGINE, ["moe_router"], True, ROUTER | LAYER | {"moe", "dispatch"}),
        (TRANSFORMER_ENGINE, ["moe_router", "moe_preprocess"], False, LAYER),
        (TRANSFORMER_ENGINE, ["moe"], True, ROUTER | EXPERTS | LAYER | {"moe", "dispatch"}),
        (TRANSFORMER_ENGINE, [], False, EVERYTHING),
        (LOCAL, ["attn"], False, EVERYTHING),
        (LOCAL, ["attn", "moe_preprocess"], True, ATTENTION | ROUTER | LAYER | {"moe", "dispatch", "moe_combine"}),
        (FULL_ITERATION, [], True, EVERYTHING),
    ],
)
def test_captured_tags_and_units_of_each_module(impl, modules, is_moe, captured):
    assert find_captured(impl, modules, is_moe=is_moe) == captured


def test_overlapped_shared_experts_are_outside_the_router_graph():
    assert "shared_expert" not in find_captured(TRANSFORMER_ENGINE, ["moe_router"], is_moe=True, has_shared_overlap=True)
    assert "shared_expert" in find_captured(TRANSFORMER_ENGINE, ["moe"], is_moe=True, has_shared_overlap=True)


@pytest.mark.parametrize(
    ("impl", "modules", "is_moe", "kept"),
    [
        (NO_GRAPHS, ["attn"], True, set()),
        (TRANSFORMER_ENGINE, ["attn", "moe_router"], True, {"attn_norm", "mlp_norm", "layer_input"}),
        (TRANSFORMER_ENGINE, ["moe_router"], True, {"mlp_norm", "layer_input"}),
        (TRANSFORMER_ENGINE, ["mlp"], False, {"mlp_norm", "layer_input"}),
        (TRANSFORMER_ENGINE, ["attn", "mlp"], False, {"attn_norm", "layer_input"}),
        (TRANSFORMER_ENGINE, [], True, {"attn_norm", "layer_input"}),
        (TRANSFORMER_ENGINE, ["moe"], True, set(default_tags().names)),
        (LOCAL, ["moe_router"], True, set(default_tags().names) - EXPERTS | {"moe_combine"}),
        (LOCAL, [], True, set(default_tags().names)),
        (FULL_ITERATION, [], False, {"layer_input"}),
    ],
)
def test_tags_that_cannot_be_offloaded_with_a_graph(impl, modules, is_moe, kept):
    found = find_kept(impl, modules, is_moe=is_moe)
    assert set(found) == kept
    assert all(found.values())
