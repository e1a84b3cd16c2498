"""Tests that tags that would offload nothing are rejected before the model is built, naming the flag and the fix."""

import types

import pytest
from support.trainings import DENSE, MIXED, MOE

from fgoffload import Action, ConfigError, IntegrationError, OffloadConfig, OffloadPlan, Site
from fgoffload.integrations.megatron.adapter.layers import _check_config
from fgoffload.integrations.megatron.flags.tag_checks import check_tags
from fgoffload.trainer.arguments import parse_arguments

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_moe_experts": 4, "num_layers": 2}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 64}


@pytest.mark.parametrize(
    ("tag", "values", "message"),
    [
        ("core_attn", FULL, "'core_attn' and --recompute-method uniform are mutually exclusive"),
        ("mlp_norm", {**FULL, **EXPERTS}, "Use layer_input instead"),
        ("layer_input", {}, "Pass --recompute-granularity full"),
        ("layer_input", {"recompute_granularity": "selective"}, "Pass --recompute-granularity full"),
        ("expert_fc1", {"num_layers": 2}, "Pass --num-experts"),
        ("router", {}, "Pass --num-experts"),
        ("shared_expert", {}, "Pass --num-experts"),
        ("shared_expert", EXPERTS, "Pass --moe-shared-expert-intermediate-size"),
        ("mlp_fc1", EXPERTS, "needs dense layers, but this model has none. Remove the tag"),
        ("mlp_act", {**EXPERTS, "moe_layer_freq": [1, 1]}, "needs dense layers, but this model has none. Remove the tag"),
        ("core_attn", {"recompute_granularity": "selective"}, "'core_attn' and --recompute-modules 'core_attn'"),
        ("expert_fc2", {**EXPERTS, "moe_paged_stash": True}, "the stash moves the experts' saved tensors to its own pages"),
        # A checkpoint's arguments define the model, but not its recompute.
        ("core_attn", {"recompute_granularity": "selective", "use_checkpoint_args": True}, "are mutually exclusive"),
    ],
)
def test_tags_that_save_nothing_are_rejected(tag, values, message):
    with pytest.raises(ConfigError, match=message):
        check_tags(OffloadConfig(offload_modules=(tag,)), values)


@pytest.mark.parametrize(
    ("tag", "values"),
    [
        ("layer_input", FULL),
        ("core_attn", {**FULL, "recompute_method": "block"}),
        ("layer_input", {**FULL, "recompute_method": "block"}),
        ("core_attn", {}),
        ("expert_fc1", EXPERTS),
        ("shared_expert", SHARED),
        ("mlp_fc1", {}),
        ("mlp_fc1", {**EXPERTS, "moe_layer_freq": [0, 1]}),
        ("mlp_fc1", {**EXPERTS, "moe_layer_freq": 2}),
        ("mlp_fc1", {"num_moe_experts": 4}),
        # Hybrid models define their layers with a pattern.
        ("mlp_fc1", {**EXPERTS, "hybrid_layer_pattern": "M*-E"}),
        ("gdp_qkv", {**EXPERTS, "is_hybrid_model": True}),
        ("expert_fc1", {"num_layers": 2, "use_checkpoint_args": True}),
    ],
)
def test_tags_that_save_something_are_accepted(tag, values):
    check_tags(OffloadConfig(offload_modules=(tag,)), values)


def test_a_plan_may_recompute_whole_layers_and_offload_their_inputs(tmp_path):
    path = tmp_path / "plan.json"
    actions = {Site(chunk=0, layer=0, tag="layer"): Action.RECOMPUTE, Site(chunk=0, layer=0, tag="layer_input"): Action.OFFLOAD}
    path.write_text(OffloadPlan(actions=actions).to_json())
    check_tags(OffloadConfig(offload_modules=("layer_input",), offload_plan=path), {})


@pytest.mark.parametrize(("flags", "tag"), [(DENSE, "router"), (MOE, "mlp_fc2"), (MIXED, "layer_input")])
def test_tags_without_effect_are_rejected_at_argument_parsing(flags, tag):
    words = f"{flags} --fine-grained-activation-offloading --offload-modules {tag}".split()
    with pytest.raises(ConfigError, match=f"--offload-modules '{tag}'"):
        parse_arguments(words, source="test", world_size=1)


@pytest.mark.parametrize(("mode", "text"), [("plan", "use a plan without recompute"), ("auto", "measures one layer at a time")])
def test_expert_overlap_rejects_auto_and_plans_that_recompute(mode, text):
    config = types.SimpleNamespace(overlap_moe_expert_parallel_comm=True, cpu_offloading=False, recompute_granularity=None)
    actions = types.SimpleNamespace(recomputes=mode == "plan", plan=None)
    offload = types.SimpleNamespace(measurement=object() if mode == "auto" else None, actions=actions)
    with pytest.raises(IntegrationError, match=text):
        _check_config(config, offload)
