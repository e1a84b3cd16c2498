"""Megatron's flags become fields of its config, and what cannot be is refused with flag, value and fix."""

import argparse
from collections.abc import Sequence

import pytest
import torch

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import (
    TrainingArguments,
    add_fine_grained_offload_args,
    build_transformer_config,
    parse_arguments,
)
from fgoffload.integrations.megatron.training_arguments import DEFAULT_ROUTER_TOPK
from fgoffload.tags import Tag, default_tags

BASE_FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
BASE = BASE_FLAGS.split()


def parse(flags: str, *, base: Sequence[str] = BASE, world_size: int | None = None) -> TrainingArguments:
    return parse_arguments([*base, *flags.split()], source="x.sh", world_size=world_size)


def build(flags: str) -> object:
    arguments = parse(flags)
    return build_transformer_config(arguments, offload=arguments.offload)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("", "num_layers", 4),
        ("--num-experts 8", "num_moe_experts", 8),
        ("--num-moe-experts 8", "num_moe_experts", 8),
        ("--num-experts 8 --moe-ffn-hidden-size 32", "moe_ffn_hidden_size", 32),
        ("--num-experts 8 --moe-router-topk 4", "moe_router_topk", 4),
        ("--num-experts 8 --moe-layer-freq 2", "moe_layer_freq", 2),
        ("--num-experts 8 --moe-layer-freq [0]*1+[1]*3", "moe_layer_freq", [0, 1, 1, 1]),
        ("--num-experts 8 --moe-layer-freq ([0]+[1])*2", "moe_layer_freq", [0, 1, 0, 1]),
        ("--num-experts 8 --moe-router-load-balancing-type none", "moe_router_load_balancing_type", "none"),
        ("--num-experts 8 --moe-aux-loss-coeff 1e-2", "moe_aux_loss_coeff", 1e-2),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("", "add_bias_linear", True),
        ("--swiglu", "gated_linear_unit", True),
        ("--swiglu", "activation_func", torch.nn.functional.silu),
        ("--swiglu", "bias_activation_fusion", True),
        ("--swiglu --no-bias-swiglu-fusion", "bias_activation_fusion", False),
        ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
        ("--no-rope-fusion", "apply_rope_fusion", False),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("", "num_query_groups", 4),
        ("--normalization RMSNorm", "normalization", "RMSNorm"),
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--hidden-dropout 0.25", "hidden_dropout", 0.25),
        ("--no-attention-softmax-in-fp32", "attention_softmax_in_fp32", False),
        ("--bf16", "params_dtype", torch.bfloat16),
        ("--bf16", "pipeline_dtype", torch.bfloat16),
        ("", "params_dtype", torch.float32),
        ("--window-size 8,0", "window_size", (8, 0)),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--recompute-granularity selective --recompute-modules mlp moe", "recompute_modules", ["mlp", "moe"]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "recompute_num_layers", 2),
        ("--pipeline-model-parallel-size 2", "virtual_pipeline_model_parallel_size", None),
        ("--pipeline-model-parallel-size 2", "batch_p2p_comm", True),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "virtual_pipeline_model_parallel_size",
            2,
        ),
        ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2", "overlap_p2p_comm", True),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "batch_p2p_comm", False),
    ],
)
def test_a_flag_sets_its_field(flags: str, field: str, value: object) -> None:
    assert getattr(build(flags), field) == value


def test_a_later_flag_wins_over_an_earlier_one() -> None:
    assert parse("--lr 1e-3 --lr 1e-4 --num-layers 8").lr == 1e-4
    assert parse("--num-layers 8").transformer["num_layers"] == 8


def test_training_flags_have_megatrons_defaults() -> None:
    arguments = parse("--global-batch-size 6")

    assert arguments.num_microbatches == 6
    assert arguments.max_position_embeddings == arguments.seq_length == 32
    assert (arguments.seed, arguments.padded_vocab_size) == (1234, 256)
    assert arguments.offload is None


def test_microbatches_are_shared_out_to_data_parallel_ranks() -> None:
    arguments = parse("--pipeline-model-parallel-size 2 --global-batch-size 8 --micro-batch-size 2", world_size=4)

    assert (arguments.data_parallel_size, arguments.num_microbatches) == (2, 2)


def test_what_latent_attention_is_without_flags_is_what_megatron_lm_makes_of_it():
    """Its parser's defaults, which are not those of the config: `_add_mla_args` of core 0.16.1."""
    config = build("--multi-latent-attention")
    assert type(config).__name__ == "MLATransformerConfig"
    ranks = {"q_lora_rank": None, "kv_lora_rank": 32}
    heads = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    positions = {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    expected = {**ranks, **heads, **positions, "normalization": "LayerNorm"}
    assert {name: getattr(config, name) for name in expected} == expected
    given = build("--multi-latent-attention --q-lora-rank 7 --rotary-scaling-factor 40 --normalization RMSNorm --rotary-base 5")
    assert (given.q_lora_rank, given.rotary_scaling_factor, given.rotary_base) == (7, 40, 5)
    assert (given.kv_lora_rank, given.normalization) == (32, "RMSNorm")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layer 4", r"x\.sh: --num-layer is not a flag that this version knows. Did you mean --num-layers\?"),
        ("--completely-unheard-of", r"--completely-unheard-of is not a flag that this version knows. Leave it out"),
        ("stray", "'stray' stands where a flag should"),
        ("--num-layers four", r"x\.sh: --num-layers 'four' is not a whole number. Give one, as in 4"),
        ("--num-layers", "--num-layers expected one argument. Give it after the flag"),
        ("--num-layers 0", "--num-layers 0 is below 1. Give 1 or more"),
        ("--lr nan", "--lr 'nan' is not a number"),
        ("--hidden-dropout x", "--hidden-dropout 'x' is not a number"),
        ("--normalization Foo", "--normalization 'Foo' is none of: LayerNorm, RMSNorm. Give one of them."),
        ("--micro-batch-size 0", "--micro-batch-size 0 is below 1"),
        ("--seq-length 0", "--seq-length 0 is below 1"),
        ("--global-batch-size 0", "--global-batch-size 0 is below 1"),
        ("--global-batch-size 3 --micro-batch-size 2", "--global-batch-size 3 is not a multiple of .* = 2. Give 2"),
        ("--train-iters 0", "--train-iters 0 is below 1"),
        ("--max-position-embeddings 4", "--seq-length 32 is above --max-position-embeddings 4"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without --group-query-attention"),
        ("--q-lora-rank 2", "--q-lora-rank has no effect without --multi-latent-attention"),
        ("--moe-layer-freq [1]*10**9", r"--moe-layer-freq '\[1\]\*10\*\*9' is neither"),
        ("--moe-layer-freq [1]*99999999", "is neither a whole number nor a list"),
        ("--moe-layer-freq print(1)", "is neither a whole number nor a list"),
        ("--moe-layer-freq [1]*3", "has 3 entries for --num-layers 4"),
        ("--moe-layer-freq 0", "--moe-layer-freq 0 is below 1"),
        ("--num-layers 1_0", "--num-layers '1_0' is not a whole number"),
        ("--lr 1_0", "--lr '1_0' is not a number"),
        ("--lr -1e-3", r"--lr -0\.001 is no learning rate. Give a finite number from 0"),
        ("--seed -1", "--seed -1 is outside 0 to 4294967295"),
        ("--seed 4294967296", "--seed 4294967296 is outside 0 to 4294967295"),
        ("--vocab-size 100 --make-vocab-size-divisible-by 1", "--vocab-size 100, padded to 100 by .* Give --vocab-size 256"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0 is below 1"),
        ("--rotary-percent 0", r"--rotary-percent 0\.0 is no part of a head"),
        ("--rotary-percent 1.5", r"--rotary-percent 1\.5 is no part of a head"),
        ("--rotary-base 0", "--rotary-base 0 is below 1"),
        ("--hidden-dropout 1.5", r"--hidden-dropout 1\.5 is outside 0 to 1"),
        ("--attention-dropout -0.5", r"--attention-dropout -0\.5 is outside 0 to 1"),
        ("--ffn-hidden-size 0", "--ffn-hidden-size 0 is below 1"),
        ("--moe-ffn-hidden-size 0", "--moe-ffn-hidden-size 0 is below 1"),
        ("--moe-shared-expert-intermediate-size -1", "--moe-shared-expert-intermediate-size -1 is below 1"),
        ("--expert-model-parallel-size 0", "--expert-model-parallel-size 0 is below 1"),
        ("--num-experts 0", "--num-experts 0 is below 1"),
        ("--num-experts 1", r"--moe-router-topk 2 \(the default\) is above --num-experts 1. Give --moe-router-topk 1 or less"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is above --num-experts 4"),
        ("--num-experts 4 --moe-router-topk 0", "--moe-router-topk 0 is below 1"),
        ("--kv-channels 0", "--kv-channels 0 is below 1"),
        ("--kv-channels 7 --position-embedding-type rope", "--kv-channels 7 is odd, .* Give --kv-channels 8"),
        ("--hidden-size 28 --position-embedding-type rope", "gives a head 7 channels, an odd number, .* Give --hidden-size 32"),
        ("--hidden-size 3", "--hidden-size 3 is below --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 0", "--num-query-groups 0 is below 1"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn --offload-prefetch -1MiB",
            "--offload-prefetch '-1MiB' is below 0, and sizes cannot be negative",
        ),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn,attn_proj",
            "separate tags with blanks, as in --offload-modules core_attn attn_proj",
        ),
        ("--virtual-pipeline-model-parallel-size 2", "needs 2 stages or more"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0 is below 1"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 x 2 stages does not divide --num-layers 4",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
            "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 .* Give one of them",
        ),
        ("--fine-grained-activation-offloading", "--offload-modules is empty"),
        ("--fine-grained-activation-offloading --offload-modules core_atn", r"Did you mean 'core_attn'\?"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn --recompute-activations",
            "'core_attn' and --recompute-modules 'core_attn' exclude each other",
        ),
        ("--min-offloaded-tensor-size x", "--min-offloaded-tensor-size 'x' is not a whole number"),
        ("--fp16 --bf16", "Megatron-Core refuses this combination of flags: Only one of"),
        ("--recompute-granularity full", "Megatron-Core refuses this combination of flags: .*recompute_method"),
    ],
)
def test_what_cannot_be_is_refused_with_flag_value_and_fix(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(flags)


@pytest.mark.parametrize(
    ("flags", "typed", "place"),
    [
        ("--lr -1", "", "x.sh"),
        ("", "--lr -1", "the command line"),
        ("--lr -1", "--seed 1", "x.sh"),
        ("--lr 1", "--lr -1", "the command line"),
        ("", "--num-layer 4", "the command line"),
        ("", "--num-layers x", "the command line"),
        ("--num-experts 4", "--moe-router-topk 5", "x.sh and the command line"),
        ("--num-experts 4 --moe-router-topk 5", "--lr 1", "x.sh"),
        ("--fine-grained-activation-offloading", "--offload-modules core_atn", "the command line"),
        # Recompute is the file's, but no flag that the error names is.
        ("--recompute-activations", "--fine-grained-activation-offloading --offload-modules core_attn", "the command line"),
    ],
)
def test_an_error_names_the_place_of_the_flags_that_it_is_about(flags: str, typed: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*BASE, *flags.split()], source="x.sh", typed=typed.split())

    assert str(caught.value).startswith(f"{place}: ")


def test_typed_flags_win_and_leave_the_others_as_they_are() -> None:
    arguments = parse_arguments([*BASE, "--lr", "0.5", "--swiglu"], source="x.sh", typed=["--num-layers", "2"])

    assert (arguments.transformer["num_layers"], arguments.lr) == (2, 0.5)
    assert arguments.transformer["gated_linear_unit"] is True


def test_a_flag_that_others_read_is_suggested_where_it_could_have_been_typed() -> None:
    with pytest.raises(ConfigError, match=r"the command line: --step is not .* Did you mean --steps\?"):
        parse_arguments(BASE, source="x.sh", typed=["--step", "3"], known_elsewhere=["--steps"])
    with pytest.raises(ConfigError, match=r"x\.sh: --step is not .* Leave it out\."):
        parse_arguments([*BASE, "--step", "3"], source="x.sh", known_elsewhere=["--steps"])


def test_offload_can_be_switched_off_after_it_was_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    flags = "--fine-grained-activation-offloading --offload-modules core_attn --no-fine-grained-activation-offloading"

    assert parse(flags).offload is None
    assert caplog.text == ""


def test_a_fraction_of_zero_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    parse("--fine-grained-activation-offloading --offload-modules core_attn --activation-offload-fraction 0")

    assert [record.getMessage()[:31] for record in caplog.records] == ["--activation-offload-fraction 0"]


def test_the_ends_of_the_ranges_are_accepted() -> None:
    flags = "--lr 0 --seed 4294967295 --rotary-percent 1 --rotary-base 1 --hidden-dropout 0 --attention-dropout 1"

    assert parse(f"{flags} --num-experts 1 --moe-router-topk 1 --vocab-size 129").padded_vocab_size == 256


def test_the_default_of_the_routers_topk_is_megatrons() -> None:
    assert build("--num-experts 8").moe_router_topk == DEFAULT_ROUTER_TOPK


@pytest.mark.parametrize(
    "flag", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"]
)
def test_a_missing_flag_is_named(flag: str) -> None:
    at = BASE.index(flag)

    with pytest.raises(ConfigError, match=rf"x\.sh: {flag} is missing. Give it, as in {flag} \d+"):
        parse("", base=BASE[:at] + BASE[at + 2 :])


def test_processes_that_hold_no_whole_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one copy of the model takes 2 processes .* and there are 3"):
        parse("--pipeline-model-parallel-size 2", world_size=3)


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        parse("--nonsense")

    assert capsys.readouterr() == ("", "")


def test_offload_flags_become_an_offload_config() -> None:
    offload = parse(
        "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --min-offloaded-tensor-size 7 "
        "--activation-offload-fraction 0.5 --offload-window 1MiB --offload-prefetch 2MiB --offload-host-budget 3GiB"
    ).offload

    assert offload is not None
    assert offload.offload_modules == ("core_attn", "attn_proj")
    assert (offload.min_offloaded_tensor_size, offload.activation_offload_fraction) == (7, 0.5)
    assert (offload.offload_window_bytes, offload.offload_prefetch_bytes) == (2**20, 2**21)
    assert offload.offload_host_budget_bytes == 3 * 2**30


def test_megatron_gets_the_offload_flags_that_it_knows() -> None:
    config = build(
        "--fine-grained-activation-offloading --offload-modules core_attn moe_act --min-offloaded-tensor-size 7 --num-experts 2"
    )

    assert config.fine_grained_activation_offloading
    assert config.offload_modules == ["core_attn", "moe_act"]
    assert config.min_offloaded_tensor_size == 7


def test_a_tag_that_megatron_does_not_know_stays_ours() -> None:
    tags = default_tags().with_tag(Tag(name="mine", saves="a test"))
    both = OffloadConfig(offload_modules=("core_attn", "mine"), tags=tags)
    alone = OffloadConfig(offload_modules=("mine",), tags=tags)

    assert build_transformer_config(parse(""), offload=both).offload_modules == ["core_attn"]
    assert not build_transformer_config(parse(""), offload=alone).fine_grained_activation_offloading


def test_offload_off_is_off_in_megatron_too() -> None:
    arguments = parse("--fine-grained-activation-offloading --offload-modules core_attn")

    assert not build_transformer_config(arguments, offload=None).fine_grained_activation_offloading


def test_offload_flags_join_a_parser_that_has_some_of_them() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fine-grained-activation-offloading", action="store_true")
    parser.add_argument("--offload-modules", nargs="*", type=str)

    flags = add_fine_grained_offload_args(parser).parse_args(
        ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "--offload-window", "1KiB"]
    )

    config = OffloadConfig.from_flags(flags)
    assert config is not None
    assert (config.offload_modules, config.offload_window_bytes) == (("core_attn",), 1024)


def test_an_empty_parser_with_the_offload_flags_has_offload_off() -> None:
    assert OffloadConfig.from_flags(add_fine_grained_offload_args(argparse.ArgumentParser()).parse_args([])) is None


def test_tags_without_the_switch_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("--offload-modules core_attn").offload is None
    assert "--offload-modules has no effect without --fine-grained-activation-offloading" in caplog.text
