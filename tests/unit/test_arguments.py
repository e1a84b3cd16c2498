"""Tests the config fields set by Megatron's flags, and the errors of invalid flags."""

import argparse
from collections.abc import Sequence

import pytest
import torch

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.trainer.arguments import TrainingArguments, build_transformer_config, parse_arguments

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
        ("--num-experts 8", "num_moe_experts", 8),
        ("--num-experts 8 --moe-layer-freq 2", "moe_layer_freq", 2),
        ("--num-experts 8 --moe-layer-freq [0]*1+[1]*3", "moe_layer_freq", [0, 1, 1, 1]),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--swiglu", "activation_func", torch.nn.functional.silu),
        ("--swiglu --no-bias-swiglu-fusion", "bias_activation_fusion", False),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--bf16", "params_dtype", torch.bfloat16),
        ("--window-size 8,0", "window_size", (8, 0)),
        ("--recompute-granularity selective --recompute-modules mlp moe", "recompute_modules", ["mlp", "moe"]),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "virtual_pipeline_model_parallel_size",
            2,
        ),
    ],
)
def test_a_flag_sets_its_field(flags: str, field: str, value: object) -> None:
    assert getattr(build(flags), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layer 4", r"x\.sh: --num-layer is an unknown flag. Did you mean --num-layers\?"),
        ("stray", "'stray' is not a flag"),
        ("--num-layers four", r"x\.sh: --num-layers 'four' is not a whole number. Use one, for example 4"),
        ("--num-layers 0", "--num-layers 0 is below 1. Use 1 or more"),
        ("--normalization Foo", "--normalization 'Foo' is not supported. Use one of: LayerNorm, RMSNorm."),
        ("--global-batch-size 3 --micro-batch-size 2", "--global-batch-size 3 is not a multiple of .* = 2. Use 2"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without --group-query-attention"),
        ("--moe-layer-freq print(1)", "is neither a whole number nor a list"),
        ("--seed -1", "--seed -1 is not between 0 and 4294967295"),
        ("--vocab-size 100 --make-vocab-size-divisible-by 1", "--vocab-size 100, padded to 100 by .* Use --vocab-size 256"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is above --num-experts 4"),
        (
            "--kv-channels 7 --position-embedding-type rope",
            "--kv-channels 7 .* must be above 0 and, with .*, even. Use --kv-channels 8",
        ),
        ("--group-query-attention --num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 4"),
        ("--virtual-pipeline-model-parallel-size 2", "needs at least 2 stages"),
        ("--fine-grained-activation-offloading", "--offload-modules is empty"),
        ("--recompute-granularity full", "Megatron-Core rejects this combination of flags: .*recompute_method"),
    ],
)
def test_invalid_flags_are_rejected_with_flag_value_and_fix(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(flags)


@pytest.mark.parametrize(
    ("flags", "typed", "source_name"),
    [
        ("--lr -1", "", "x.sh: "),
        ("", "--lr -1", "--lr"),
        ("--num-experts 4", "--moe-router-topk 5", "x.sh and the command line: "),
    ],
)
def test_errors_name_the_source_of_the_flags(flags: str, typed: str, source_name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*BASE, *flags.split()], source="x.sh", typed=typed.split())

    assert str(caught.value).startswith(source_name)


@pytest.mark.parametrize(
    "flag", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"]
)
def test_a_missing_required_flag_is_named(flag: str) -> None:
    position = BASE.index(flag)

    with pytest.raises(ConfigError, match=rf"x\.sh: {flag} is missing. Add it, for example {flag} \d+"):
        parse("", base=BASE[:position] + BASE[position + 2 :])


def test_megatrons_config_receives_its_own_offload_flags() -> None:
    config = build(
        "--fine-grained-activation-offloading --offload-modules core_attn moe_act --min-offloaded-tensor-size 7 --num-experts 2"
    )

    assert config.fine_grained_activation_offloading
    assert config.offload_modules == ["core_attn", "moe_act"]
    assert config.min_offloaded_tensor_size == 7


def test_offload_flags_are_added_to_a_parser_that_already_has_some() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fine-grained-activation-offloading", action="store_true")
    parser.add_argument("--offload-modules", nargs="*", type=str)

    flags = add_fine_grained_offload_args(parser).parse_args(
        ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "--offload-window", "1KiB"]
    )

    config = OffloadConfig.from_flags(flags)
    assert config is not None
    assert (config.offload_modules, config.offload_window_bytes) == (("core_attn",), 1024)


def test_one_warning_lists_flags_that_the_trainer_ignores(caplog):
    build("--use-mcore-models --tokenizer-type X --weight-decay 0.1 --no-use-distributed-optimizer --use-mcore-models")
    (line,) = caplog.messages
    ignored = "--use-mcore-models --tokenizer-type --weight-decay --no-use-distributed-optimizer"
    assert line == f"x.sh: this command ignores flags that its trainer does not need: {ignored}"
