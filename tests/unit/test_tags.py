import re

import pytest

from fgoffload.errors import ConfigError
from fgoffload.tags import RECOMPUTE_UNITS, Tag, TagRegistry, default_tags, find_recompute_unit

pytestmark = pytest.mark.quick

NAMES = (
    *("layer_input", "attn_norm", "qkv_linear", "gdp_qkv", "core_attn", "attn_proj", "mlp_norm"),
    *("mlp_fc1", "mlp_act", "mlp_fc2", "shared_expert", "router"),
    *("expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine"),
)


def test_the_default_tags_come_in_the_order_of_a_layers_forward():
    assert default_tags().names == NAMES


def test_each_call_gives_a_registry_that_equals_the_others():
    assert default_tags() == default_tags()


def test_iteration_and_membership_agree_with_the_names():
    tags = default_tags()
    assert tuple(tag.name for tag in tags) == NAMES
    assert all(name in tags for name in NAMES)
    assert "embedding" not in tags


def test_every_default_tag_says_what_it_saves():
    assert [tag.name for tag in default_tags() if not tag.saves] == []


def test_get_returns_the_tag_of_that_name():
    assert default_tags().get("moe_act").name == "moe_act"


def test_an_unknown_tag_is_refused_with_flag_value_valid_tags_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        default_tags().get("core_atn")
    assert str(caught.value) == (
        f"--offload-modules 'core_atn' is not a tag. Did you mean 'core_attn'? Valid tags: {' '.join(NAMES)}."
    )


def test_an_unknown_tag_that_is_near_to_none_gets_no_hint():
    with pytest.raises(ConfigError) as caught:
        default_tags().get("zzz", flag="--mine")
    assert str(caught.value) == f"--mine 'zzz' is not a tag. Valid tags: {' '.join(NAMES)}."


@pytest.mark.parametrize("unit", ["layer", "moe", "dispatch"])
def test_a_unit_that_is_no_tag_is_called_one(unit):
    with pytest.raises(
        ConfigError, match=rf"'{unit}' is not a tag\. It can be recomputed by a plan, and nothing of its own leaves\."
    ):
        default_tags().get(unit)


@pytest.mark.parametrize("name", ["core_attn,attn_proj", "core_attn, attn_proj", "core_attn,attn_proj,"])
def test_tags_that_commas_separate_are_refused_with_how_to_write_them(name):
    with pytest.raises(ConfigError) as caught:
        default_tags().get(name)
    assert str(caught.value) == (
        f"--offload-modules {name!r} is not a tag: separate tags with blanks, as in --offload-modules core_attn attn_proj."
    )


def test_check_returns_the_tags_in_the_order_in_which_they_were_named():
    assert [tag.name for tag in default_tags().check(["attn_proj", "core_attn"])] == ["attn_proj", "core_attn"]


def test_attn_proj_without_core_attn_is_refused_with_both_ways_out():
    with pytest.raises(ConfigError) as caught:
        default_tags().check(["attn_proj", "moe_act"])
    assert str(caught.value) == (
        "--offload-modules 'attn_proj' needs 'core_attn' with it: both save the same storage, and one of them alone frees "
        "nothing. Add 'core_attn' or leave 'attn_proj' out."
    )


def test_a_tag_named_twice_is_refused():
    with pytest.raises(ConfigError, match=re.escape("--offload-modules names 'moe_act' twice. Name each tag once.")):
        default_tags().check(["moe_act", "moe_act"])


def test_a_tag_of_your_own_comes_last_and_changes_no_other_registry():
    before = default_tags()
    after = before.with_tag(Tag(name="my_router", saves="router logits"))
    assert after.names == (*NAMES, "my_router")
    assert before.names == NAMES


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigError, match=re.escape("tag 'moe_act' is registered twice. Give each tag its own name.")):
        default_tags().with_tag(Tag(name="moe_act", saves="x"))


def test_a_requirement_that_is_not_registered_is_refused():
    with pytest.raises(ConfigError, match=re.escape("tag 'a' requires 'b', which is not registered. Register it first.")):
        TagRegistry((Tag(name="a", saves="x", requires=("b",)),))


@pytest.mark.parametrize("name", ["", "two words", "a-b", "1a"])
def test_a_tag_name_that_is_not_one_word_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        Tag(name=name, saves="x")
    assert str(caught.value) == f"tag name {name!r} is not one word. Use letters, digits and underscores."


def test_tags_of_modules_that_do_each_others_work_are_refused_together():
    with pytest.raises(
        ConfigError, match=re.escape("--offload-modules names 'fused_group_mlp' and 'moe_act': where a model has")
    ):
        default_tags().check(["moe_act", "fused_group_mlp"])


def test_every_unit_of_recompute_covers_tags_or_units_that_exist():
    known = {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)}
    assert {name for unit in RECOMPUTE_UNITS for name in (*unit.covers, *unit.excludes)} <= known
    assert find_recompute_unit("layer") is RECOMPUTE_UNITS[0]
    assert find_recompute_unit("attn_proj") is None


def test_megatrons_own_modules_are_those_that_its_check_takes():
    own = [tag.name for tag in default_tags() if tag.is_in_megatron]
    assert own == ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


def test_megatron_takes_its_own_modules_and_refuses_the_others():
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig

    def make(names):
        return config(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            fine_grained_activation_offloading=True,
            offload_modules=list(names),
            cuda_graph_scope=[],
        )

    make(tag.name for tag in default_tags() if tag.is_in_megatron)
    for tag in default_tags():
        if not tag.is_in_megatron:
            with pytest.raises(AssertionError, match=f"Invalid choices for offload_modules: .*{tag.name}"):
                make([tag.name])
