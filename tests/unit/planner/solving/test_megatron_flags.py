"""Megatron's flags as plans, the settings to compare with, and the flags that come nearest to a plan."""

import doctest

import pytest
from support.deepseek_ranks import make_ranks
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, ConfigError
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.solving import megatron_flags
from fgoffload.planner.solving.megatron_flags import (
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
    baselines,
    choose_usual_modules,
)


def write(plan):
    """Return the rows of a plan as text, those of one layer after the other."""
    return {f"{site}: {action.value}" for site, action in plan.actions.items()}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (MegatronFlags(), ""),
        (
            MegatronFlags(offload_modules=("core_attn", "attn_proj"), activation_offload_fraction=0.5),
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --activation-offload-fraction 0.5",
        ),
        (
            MegatronFlags(recompute=SelectiveRecompute(modules=("layernorm", "moe_act"))),
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
        ),
        (
            MegatronFlags(recompute=FullRecompute(method=FullMethod.BLOCK, layers=3)),
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
    ],
)
def test_flags_are_the_words_that_megatron_takes(flags, words):
    assert " ".join(flags.list_arguments()) == words


def test_a_fraction_takes_the_first_sites_of_each_chunk():
    # Two chunks of two layers with two of these sites each: three quarters of four are three, and the last site stays.
    rank = make_toy_rank(layers=[[make_toy_layer()] * 2] * 2, pipeline=Pipeline(stages=2, chunks=2, microbatches=2))
    flags = MegatronFlags(offload_modules=("core_attn", "moe_act"), activation_offload_fraction=0.75)
    assert write(flags.make_plan([rank])) == {
        "layers.0.core_attn: offload",
        "layers.0.moe_act: offload",
        "layers.1.core_attn: offload",
        "layers.2.core_attn: offload",
        "layers.2.moe_act: offload",
        "layers.3.core_attn: offload",
    }


def test_a_module_that_runs_again_and_whose_tag_leaves_has_both():
    rank = make_toy_rank(layers=[[make_toy_layer()]])
    flags = MegatronFlags(offload_modules=("moe_act", "expert_fc2"), recompute=SelectiveRecompute(modules=("moe_act",)))
    # What follows the activation saves nothing then.
    assert write(flags.make_plan([rank])) == {"layers.0.moe_act: recompute+offload"}


def test_blocks_are_the_first_layers_of_each_chunk_and_their_inputs_can_leave():
    rank = make_toy_rank(layers=[[make_toy_layer()] * 2] * 2, pipeline=Pipeline(stages=2, chunks=2, microbatches=2))
    flags = MegatronFlags(
        offload_modules=("layer_input", "expert_fc1"), recompute=FullRecompute(method=FullMethod.BLOCK, layers=1)
    )
    assert write(flags.make_plan([rank])) == {
        "layers.0.layer: recompute",
        "layers.0.layer_input: offload",
        "layers.1.expert_fc1: offload",
        "layers.2.layer: recompute",
        "layers.2.layer_input: offload",
        "layers.3.expert_fc1: offload",
    }


def test_the_baselines_of_a_model_with_latent_attention_and_experts():
    ranks = make_ranks(stages=2, chunks=1, layers=4, microbatches=2)
    plans = baselines(ranks)
    assert list(plans) == ["nothing", "full recompute", "selective recompute", "offload everything"]
    assert plans["nothing"].actions == {}
    assert write(plans["full recompute"]) == {f"layers.{layer}.layer: recompute" for layer in range(4)}
    units = {layer: {"attn_norm", "mla_up_proj"} for layer in range(4)}
    units[3] |= {"mlp_norm", "moe_act"}  # the first three layers are dense
    assert write(plans["selective recompute"]) == {
        f"layers.{layer}.{unit}: recompute" for layer in units for unit in units[layer]
    }
    assert {action for action in plans["offload everything"].actions.values()} == {Action.OFFLOAD}
    assert plans["offload everything"].list_layer(0, 3).keys() == {
        "attn_norm",
        "qkv_linear",
        "core_attn",
        "attn_proj",
        "mlp_norm",
        "shared_expert",
        "router",
        "expert_fc1",
        "moe_act",
        "expert_fc2",
        "moe_combine",
    }


def test_usual_modules_of_a_model_without_experts_are_megatrons_default():
    layer = make_toy_layer()
    dense = type(layer)(kind="dense", segments=layer.segments, tensors=layer.tensors, units=layer.units[:1])
    assert choose_usual_modules([make_toy_rank(layers=[[dense]])]) == ("core_attn",)
    assert choose_usual_modules([make_toy_rank()]) == ("layernorm", "moe_act")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectiveRecompute(modules=("nothing",)), "--recompute-modules 'nothing'"),
        (lambda: FullRecompute(method=FullMethod.UNIFORM, layers=2), "--recompute-num-layers 2 with uniform"),
        (lambda: FullRecompute(method=FullMethod.BLOCK, layers=0), "--recompute-num-layers 0 with block"),
    ],
)
def test_what_flags_cannot_say_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_example_runs():
    assert doctest.testmod(megatron_flags).failed == 0
