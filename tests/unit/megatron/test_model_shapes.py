"""Tests how Megatron's flags set the model and the parallelism of a plan."""

import argparse
import dataclasses

import pytest
from support.versions import is_installed

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_flags import build_model_parser, list_unknown
from fgoffload.integrations.megatron.flags.model_shapes import read_model, read_model_file
from fgoffload.integrations.megatron.flags.other_flags import find_effect
from fgoffload.planner.model.layer_shape import RouterShape

REQUIRED = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
DENSE = f"{REQUIRED} --ffn-hidden-size 256 --vocab-size 1000 --swiglu --position-embedding-type rope --bf16"
MIXTURE = f"{DENSE} --num-experts 8 --moe-ffn-hidden-size 96 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
LATENT = f"{DENSE} --multi-latent-attention --kv-lora-rank 32"


def read(flags="", *, base=DENSE, **options):
    return read_model(f"{base} {flags}".split(), source="file.sh", **options)


def read_shape(flags="", *, base=DENSE):
    return read(flags, base=base)[0]


def read_ranks(flags="", *, base=DENSE, **options):
    return read(flags, base=base, **options)[1]


def remove_flag(flag, base=DENSE):
    before, after = base.split(f"{flag} ")
    return before + after.partition(" ")[2]


LEARNED = "--position-embedding-type learned_absolute"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--no-bias-swiglu-fusion", {"has_fused_activation": False}),
        ("--position-embedding-type none", {"rotary_percent": 0.0, "learned_positions": 0}),
        (LEARNED, {"rotary_percent": 0.0, "learned_positions": 128}),
        ("--position-embedding-type yarn", {"rotary_percent": 1.0, "has_fused_rotary": False}),
        ("--window-size 127,0", {"window_tokens": 127, "window_layers": None}),
        ("--window-size (127,0) --window-attn-skip-freq 2", {"window_tokens": 127, "window_layers": (True, False) * 4}),
        ("--fp8-format hybrid", {"fp8_recipe": "delayed"}),
        ("--fp8-format e4m3 --fp8-recipe blockwise", {"fp8_recipe": "blockwise"}),
        ("--make-vocab-size-divisible-by 300", {"vocab_size": 1200}),
        ("--no-swiglu --quick-geglu", {"is_gated": True, "has_quick_gate": True}),
        ("--num-experts 8 --moe-layer-freq ([0]*2+[1]*6)", {"moe_layers": (False,) * 2 + (True,) * 6}),
    ],
)
def test_flags_set_model_fields(flags, expected):
    model = read_shape(flags)
    assert {name: getattr(model, name) for name in expected} == expected


SHARED = "--moe-shared-expert-intermediate-size 192"
SEQUENCE_LOSS = "--moe-router-load-balancing-type seq_aux_loss"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SHARED, {"shared_ffn_hidden_size": 192}),
        (f"{SHARED} --moe-shared-expert-overlap", {"shared_ffn_hidden_size": 192, "has_shared_overlap": True}),
        ("--moe-permute-fusion", {"has_fused_permutation": True, "has_grouped_linears": True}),
        ("--no-moe-grouped-gemm", {"has_grouped_linears": False}),
        ("--moe-router-force-load-balancing", {"imbalance": 1.0}),
        ("--moe-expert-capacity-factor 1.1", {"imbalance": 1.1}),
        ("--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity", {"imbalance": 2.0}),
        ("--moe-router-dtype fp32", {"router": RouterShape(dtype_bytes=4)}),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            {"router": RouterShape(score_function="sigmoid", has_expert_bias=True)},
        ),
        ("--moe-aux-loss-coeff 0.01", {"router": RouterShape(balancing="aux_loss")}),
        (f"{SEQUENCE_LOSS} --moe-aux-loss-coeff 1e-4", {"router": RouterShape(balancing="seq_aux_loss")}),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-4", {"router": RouterShape()}),
    ],
)
def test_flags_set_expert_fields(flags, expected):
    experts = read_shape(flags, base=MIXTURE).experts
    assert {name: getattr(experts, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tp 4 --sequence-parallel", {"tensor_parallel_size": 4, "has_sequence_parallel": True}),
        ("--tp 2 --sequence-parallel --expert-tensor-parallel-size 1", {"expert_tensor_parallel_size": 1}),
        ("--pp 2 --global-batch-size 16", {"pipeline_parallel_size": 2, "microbatches": 8, "virtual_pipeline_size": None}),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8", {"virtual_pipeline_size": 2}),
        ("--pp 2 --pipeline-model-parallel-layout Et*4|t*4L", {"pipeline_layout": "Et*4|t*4L", "chunks": 1}),
        ("--overlap-moe-expert-parallel-comm", {"has_expert_overlap": True}),
        (
            "--pp 2 --vp 2 --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 4",
            {"microbatch_group_size": 4},
        ),
        ("--num-experts 8 --ep 4 --pp 2 --cp 2", {"expert_parallel_size": 4, "data_parallel_size": 2, "world_size": 8}),
    ],
)
def test_flags_set_parallelism_fields(flags, expected):
    parallelism = read_ranks(flags)
    assert {name: getattr(parallelism, name) for name in expected} == expected


INVALID = {
    "--hidden-size 66": "--hidden-size 66 is not a multiple of --num-attention-heads 4. Use a multiple",
    "--multi-latent-attention": "--kv-lora-rank is missing, but --multi-latent-attention needs it",
    "--num-experts 8 --moe-router-dtype fp64": "--moe-router-dtype fp64 is not supported: the router's saved",
    "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1": "sinkhorn is not supp",
    "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 3": "topk 3 is not between 1 and --moe",
    "--fp8-format e4m3 --fp8-recipe secret": "--fp8-recipe 'secret' is not supported. Use one of",
    "--no-swiglu --quick-geglu --no-bias-swiglu-fusion": "with --quick-geglu: the saved bytes of the unfused activation",
    "--tp 2 --mtp-num-layers 1": "without --sequence-parallel is not supported with multi-token prediction.",
    "--pp 2 --vp 2 --num-layers-per-virtual-pipeline-stage 1": "--num-virtual-stages-per-pipeline-rank 2 .* Use only one",
}


def is_unparsed(flag):
    try:
        return bool(build_model_parser("file.sh").parse_known_args([flag])[1])
    except ConfigError:  # a value is missing
        return False


@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")
@pytest.mark.skipif(not is_installed("0.19"), reason="later releases have all flags of the earlier ones")
def test_every_flag_of_megatrons_parser_is_known():
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    assert [flag for flag in list_unknown(flags) if find_effect(flag) is None and is_unparsed(flag)] == []


@pytest.mark.parametrize("flags", INVALID)
def test_invalid_flags_are_rejected(flags):
    with pytest.raises(ConfigError, match=INVALID[flags]):
        read(flags)


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        *((flag, "", f"file.sh: {flag} is missing. Pass it, for example {flag} ") for flag in REQUIRED.split()[::2]),
        ("--ffn-hidden-size", "", "--ffn-hidden-size is missing; Megatron-LM and Megatron-Core have different"),
        ("--ffn-hidden-size", "--no-swiglu --num-experts 4", "--moe-ffn-hidden-size is missing"),
    ],
)
def test_missing_flags_are_named(removed, added, message):
    with pytest.raises(ConfigError, match=message):
        read(added, base=remove_flag(removed))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--seq-lenght 256", r"^--seq-lenght is an unknown flag.* Did you mean --seq-length\?"),
        ("--save-intervl=3", r"^--save-intervl is an unknown flag.* Did you mean --save-interval\?"),
        ("--jsn 3", r"^--jsn is an unknown flag.* Did you mean --json\?"),
        ("256", "^'256' is not a flag"),
        ("--seq-length", "^--seq-length expected one argument"),
        ("--seq-length 129 --cp 2", "file.sh and the command line: --seq-length 129"),
    ],
)
def test_invalid_command_line_flags_are_rejected(typed, message):
    with pytest.raises(ConfigError, match=message):
        read(typed=typed.split(), own_flags=["--json"])


@pytest.mark.parametrize(
    ("flags", "base", "warnings"),
    [
        (
            "--lr 1e-3 --unheard-of 3 --no-jit-fuser --no-masked-softmax-fusion --save /there --recompute-granularty full",
            DENSE,
            [
                "file.sh: not modeled (predicted times are too short): --no-jit-fuser.",
                "file.sh: unknown flags, which a plan ignores: --unheard-of, --recompute-granularty (--recompute",
            ],
        ),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1", MIXTURE, ["is treated as aux_loss"]),
        ("--lora-rank 16", DENSE, ["no adapters, so predicted memory is too low and times are too long): --lora-rank."]),
        ("--tokenizer-type Llama2Tokenizer", DENSE.replace("--vocab-size", "--seed"), ["32000 tokens for Llama2Tokenizer"]),
        ("--moe-token-dispatcher-type flex --tp 2", MIXTURE, ["--sequence-parallel is assumed", "deepep: its buffers are not"]),
        ("--attention-backend unfused", MIXTURE, ["--attention-backend unfused saves the attention scores"]),
        ("--transformer-impl local", MIXTURE, ["--transformer-impl local saves different tensors"]),
        ("--no-moe-grouped-gemm", MIXTURE, ["without --moe-grouped-gemm, a plan still assumes"]),
        ("", MIXTURE.replace("--moe-token-dispatcher-type alltoall", ""), ["a plan assumes alltoall. Megatron's default, all"]),
        ("--pp 2", DENSE, ["without --global-batch-size, a step has 1 microbatch, as in Megatron"]),
        ("--moe-token-dispatcher-type flex --no-moe-grouped-gemm", DENSE, []),  # no experts
        ("--attention-backend fused --transformer-impl transformer_engine --pp 2 --global-batch-size 16", MIXTURE, []),
    ],
)
def test_flags_that_a_plan_ignores_are_reported_once(flags, base, warnings, caplog):
    read(flags, base=base)
    assert len(caplog.records) == len(warnings)
    assert all(text in record.message for text, record in zip(warnings, caplog.records, strict=True))


def test_an_argument_file_sets_the_number_of_gpus(tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(f"NUM_GPUS=${{GPUS:-4}}\nMODEL_ARGS=( {DENSE} )\n")
    model, parallelism = read_model_file(path)
    assert (model.name, parallelism.world_size) == ("mine", 4)
    assert read_model_file(path, typed=["--num-gpus", "8"])[1].world_size == 8
    path.write_text(f"MODEL_ARGS=( {DENSE} --pp 2 )\n")
    assert read_model_file(path)[1].world_size == 2  # as many as the model needs
    path.write_text(f"NUM_GPUS=many\nMODEL_ARGS=( {DENSE} )\n")
    with pytest.raises(ConfigError, match=r"mine.sh: NUM_GPUS=many is not a whole number. Use one, for example NUM_GPUS=1024."):
        read_model_file(path)


FIELDS = (
    *("moe_router_topk", "hidden_dropout", "rotary_percent", "moe_aux_loss_coeff", "add_bias_linear", "fp8_recipe"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "normalization"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_defaults_match_megatrons_config(field):
    module = pytest.importorskip("megatron.core.transformer.transformer_config")
    # MLATransformerConfig has another default for the norm, but Megatron-LM's flag overrides it.
    configs = (module.MLATransformerConfig, module.TransformerConfig)
    theirs = {one.name: one.default for config in configs for one in dataclasses.fields(config)}[field]
    text = {"add_bias_linear": "--no-disable-bias-linear"}.get(field, f"--{field.replace('_', '-')} {theirs}")
    base = f"{LATENT} --fp8-format e4m3 --num-experts 8"
    assert read_shape(text, base=base) == read_shape(base=base)
