"""Tests the registry of tags, and the recompute units."""

import re

import pytest

from fgoffload.errors import ConfigError
from fgoffload.tags import RECOMPUTE_UNITS, Tag, default_tags, find_recompute_unit

pytestmark = pytest.mark.quick

NAMES = (
    *("layer_input", "attn_norm", "qkv_linear", "gdp_qkv", "core_attn", "attn_proj", "mlp_norm"),
    *("mlp_fc1", "mlp_act", "mlp_fc2", "shared_expert", "router"),
    *("expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine"),
)


def test_default_tags_are_in_forward_order():
    assert default_tags().names == NAMES, "For a new tag, change NAMES and the files under 'Add a tag' in CONTRIBUTING.md."


def test_a_custom_tag_is_appended_to_a_copy_of_the_registry():
    before = default_tags()
    after = before.with_tag(Tag(name="my_router", saves="router logits"))
    assert after.names == (*before.names, "my_router")


@pytest.mark.parametrize("name", ["", "two words", "a-b", "1a"])
def test_a_tag_name_that_is_not_one_word_is_rejected(name):
    with pytest.raises(ConfigError) as caught:
        Tag(name=name, saves="x")
    assert str(caught.value) == f"tag name {name!r} is not an identifier. Use letters, digits and underscores."


def test_tags_of_mutually_exclusive_modules_are_rejected():
    with pytest.raises(
        ConfigError, match=re.escape("--offload-modules lists 'fused_group_mlp' and 'moe_act', but no layer has both")
    ):
        default_tags().check(["moe_act", "fused_group_mlp"])


def test_recompute_units_refer_to_existing_tags_or_units():
    known = {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)}
    assert {name for unit in RECOMPUTE_UNITS for name in (*unit.covers, *unit.excludes)} <= known
    assert find_recompute_unit("layer") is RECOMPUTE_UNITS[0]
    assert find_recompute_unit("attn_proj") is None


def test_full_layer_recompute_covers_all_tags_and_units_of_the_layer():
    layer = find_recompute_unit("layer")
    inside = {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)} - {"layer", "layer_input"}
    assert set(layer.covers) == inside, "In fgoffload/tags.py, add the tag to the covers of unit 'layer'."
