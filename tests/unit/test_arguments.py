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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layer 4", r"x\.sh: --num-layer is not a flag that this version knows. Did you mean --num-layers\?"),
        ("--completely-unheard-of", r"--completely-unheard-of is not a flag .* (Leave it out|Did you mean)"),
        ("stray", "'stray' stands where a flag should"),
        ("--num-layers four", r"x\.sh: --num-layers 'four' is not a whole number. Give one, as in 4"),
        ("--num-layers", "--num-layers expected one argument. Give it after the flag"),
        ("--num-layers 0", "--num-layers 0 is below 1. Give 1 or more"),
        ("--lr nan", "--lr 'nan' is not a number"),
        ("--hidden-dropout x", "--hidden-dropout 'x' is not a number"),
        ("--normalization Foo", "--normalization 'Foo' is none of: LayerNorm, RMSNorm"),
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
        ("--virtual-pipeline-model-parallel-size 2", "needs 2 stages or more"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0 is below 1"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 x 2 stages does not divide --num-layers 4",
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
