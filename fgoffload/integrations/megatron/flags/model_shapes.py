"""Reads the model and the parallelism from Megatron's flags, without torch or Megatron-Core.

    model, parallelism = read_model_file(Path("arguments/deepseek_v3.sh"), typed=["--seq-length", "8192"])

Absent flags get Megatron-LM's defaults, with two exceptions. A gated MLP needs `--ffn-hidden-size`, because Megatron-LM and
Megatron-Core have different defaults. Optimizer states are sharded unless you pass `--no-use-distributed-optimizer`.
"""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.argument_files import read_script_file
from fgoffload.integrations.megatron.flags.assumption_flags import make_assumptions
from fgoffload.integrations.megatron.flags.experts_flags import change_experts, make_experts
from fgoffload.integrations.megatron.flags.field_flags import name_flags, to_flag
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.integrations.megatron.flags.model_flags import build_model_parser, drop_unset, list_unknown
from fgoffload.integrations.megatron.flags.model_warnings import find_vocab_size, warn_of_flags, warn_of_unparsed
from fgoffload.integrations.megatron.flags.other_flags import find_effect
from fgoffload.integrations.megatron.flags.parallel_flags import (
    FIELD_FLAGS,
    MICROBATCHES_OF_A_CHUNK,
    VIRTUAL_STAGE_FLAGS,
    make_parallelism,
)
from fgoffload.planner.model.huggingface import name_config_fields
from fgoffload.planner.model.model_shape import (
    LatentAttention,
    ModelShape,
    check_num_layers,
    list_moe_layers,
    list_window_layers,
    pad_vocab_size,
)
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model_ranks import Assumptions

logger = logging.getLogger(__name__)

_MODEL_FLAGS = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length mtp_num_layers
moe_layer_freq window_attn_skip_freq rotary_percent make_vocab_size_divisible_by
q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
"""
"""Model and layer fields named like their Megatron flags, with `_` for `-`."""

_SET_BY_CONFIGURATION = """
num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels vocab_size
padded_vocab_size multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
position_embedding_type use_rotary_position_embeddings rotary_percent max_position_embeddings window_size
window_attn_skip_freq normalization qk_layernorm softmax_type swiglu quick_geglu gated_linear_unit disable_bias_linear
add_qkv_bias untie_embeddings_and_output_weights num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
moe_router_group_topk moe_router_num_groups moe_shared_expert_intermediate_size moe_grouped_gemm
attention_backend transformer_impl fp16
"""
"""Flags, with `_` for `-`, that are rejected if the model comes from another source, such as Hugging Face's files."""

_REQUIRED = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "micro_batch_size": 1}
"""Required flags, with example values."""

_LATENT_DEFAULTS = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Latent attention defaults that Megatron-LM and megatron-core 0.16.1 share. Their defaults for `kv_lora_rank` differ."""

_DEFAULT_VOCAB_SIZE = 256
"""Vocabulary size of `fgoffload train`, whose tokens are bytes. In Megatron-LM, the tokenizer determines the size."""


def read_model_file(
    path: Path, *, typed: Sequence[str] = (), own_flags: Collection[str] = ()
) -> tuple[ModelShape, Parallelism]:
    """Return the model and the parallelism from the argument file at `path`. See `read_model`.

    The launch command, `#SBATCH` lines or `NUM_GPUS` in the file set the number of ranks.

    Raises:
        ConfigError: The file cannot be read, or describes a model that fgoffload cannot plan.
    """
    script = read_script_file(path)
    num_gpus = script.find_num_gpus()
    found = read_model(script.flags, source=str(path), typed=typed, num_gpus=num_gpus, own_flags=own_flags)
    count = found[1].world_size
    if num_gpus is None and "--num-gpus" not in (*script.flags, *typed) and (script.is_launch or count > 1):
        logger.warning("%s does not set the number of GPUs. The plan assumes the minimum, %d. Pass --num-gpus.", path, count)
    return found


def read_model(
    flags: Sequence[str],
    *,
    source: str,
    typed: Sequence[str] = (),
    num_gpus: int | None = None,
    own_flags: Collection[str] = (),
) -> tuple[ModelShape, Parallelism]:
    """Return the model and the parallelism that `flags` describe.

    Args:
        flags: Megatron-LM's flags. Later flags override earlier ones. One warning lists unknown flags, which are skipped.
        source: Source of the flags, for errors and the model's name.
        typed: Flags from the command line. They override `flags`. Unknown ones are errors.
        num_gpus: Number of ranks if `--num-gpus` is absent. None means the minimum for the model and its experts.
        own_flags: Command-line flags that other code parses, included in suggestions for typos.

    Raises:
        ConfigError: A flag is missing or has an invalid value, or the model cannot be split across the ranks.
    """
    values = _parse(flags, source=source, typed=typed, own_flags=own_flags)
    try:
        if not values.keys() & {"num_layers", "hidden_size"}:
            raise ConfigError(
                "--num-layers and --hidden-size are missing, so the model is unknown. For a NeMo or Megatron Bridge recipe, "
                "pass the model's config.json from Hugging Face, and the parallel sizes as flags."
            )
        for name, example in _REQUIRED.items():
            if name not in values:
                raise ConfigError(f"{to_flag(name)} is missing. Pass it, for example {to_flag(name)} {example}.")
        check_num_layers(values["num_layers"])
        if "num_experts" in values and _assume_sequence_parallel(values):
            logger.warning("%s: --sequence-parallel is assumed, because Megatron needs it for experts.", source)
        model = _make_model(values, name=Path(source).stem)
        parallelism = make_parallelism(values, model, num_gpus=num_gpus)
        list_chunks(model, parallelism)  # raises if the model cannot be split across the ranks
    except ConfigError as error:
        message = name_flags(str(error), {**FIELD_FLAGS, **{name: name for name in _MODEL_FLAGS.split()}})
        raise ConfigError(f"{source}{f' and {COMMAND_LINE}' if typed else ''}: {message}") from error
    warn_of_flags(values, parallelism, source)
    return model, parallelism


def read_parallelism(
    flags: Sequence[str], *, source: str, model: ModelShape, own_flags: Collection[str] = ()
) -> tuple[ModelShape, Parallelism]:
    """Apply `flags` to a model from another source. Return the changed model and the parallelism.

    Two defaults differ from Megatron's: tensor parallelism enables sequence parallelism, and without `--global-batch-size`, a
    step has enough microbatches to fill the pipeline. A warning reports each default that is used.

    Args:
        flags: Parallel sizes, `--seq-length`, and options for layers and experts, as typed. Any other flag is an error.
        source: Source of the flags, for errors.
        model: Model, for example from Hugging Face's files. Its vocabulary is padded as in Megatron.
        own_flags: Command-line flags that other code parses, included in suggestions for typos.

    Raises:
        ConfigError: A flag has an invalid value, or the model cannot be split across the ranks.
    """
    values = _parse((), source=source, typed=flags, own_flags=own_flags)
    is_assumed = _assume_sequence_parallel(values)
    try:
        model = _change_model(model, values)
        parallelism = make_parallelism(values, model, num_gpus=None, fills_pipeline=True)
        list_chunks(model, parallelism)  # raises if the model cannot be split across the ranks
    except ConfigError as error:
        message = name_flags(str(error), {**FIELD_FLAGS, "seq_length": "seq_length", "mtp_num_layers": "mtp_num_layers"})
        raise ConfigError(f"{source}: {name_config_fields(message)}") from error
    if is_assumed:
        reason = ", because Megatron needs it for experts" if model.experts else "; --no-sequence-parallel disables it"
        logger.warning("%s: --sequence-parallel is assumed%s.", source, reason)
    if "global_batch_size" not in values:
        microbatches = parallelism.microbatches
        sequences = microbatches * parallelism.micro_batch_size * parallelism.data_parallel_size
        logger.warning(
            "%s: --global-batch-size is missing. The plan assumes %d microbatches per step, %d for each model chunk of each "
            "stage, as with --global-batch-size %d.",
            *(source, microbatches, MICROBATCHES_OF_A_CHUNK, sequences),
        )
    return model, parallelism


def read_assumptions(
    flags: Sequence[str], *, source: str, typed: Sequence[str] = (), has_optimizer: bool = True
) -> Assumptions:
    """Return the planner's assumptions from `flags`: gradients, optimizer, fused kernels and offload settings.

    Args:
        flags: Megatron-LM's flags. Later flags override earlier ones. Unknown flags are ignored.
        source: Source of the flags, for errors.
        typed: Flags from the command line. They override `flags`.
        has_optimizer: Whether steps update the parameters.

    Raises:
        ConfigError: A flag has an invalid value, or two flags are mutually exclusive.
    """
    parsed, _ = build_model_parser(source).parse_known_args(drop_unset(flags, typed))
    parsed, _ = build_model_parser(COMMAND_LINE).parse_known_args(list(typed), parsed)
    try:
        return make_assumptions(vars(parsed), has_optimizer=has_optimizer)
    except ConfigError as error:
        raise ConfigError(f"{source}{f' and {COMMAND_LINE}' if typed else ''}: {error}") from error


def _parse(flags: Sequence[str], *, source: str, typed: Sequence[str], own_flags: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of all flags, keyed by name with `_` for `-`."""
    parser = build_model_parser(source)
    parsed, left = parser.parse_known_args(drop_unset(flags, typed))
    left = [word for word in left if "swiglu" not in parsed or not word.endswith("-bias-gelu-fusion")]  # no effect with SwiGLU
    warn_of_unparsed(left, parser, source)
    parser = build_model_parser(COMMAND_LINE if flags else source, own_flags=own_flags)
    typed_values, left = parser.parse_known_args(list(typed))
    # A leftover word that is not a flag is an error if it comes first.
    for word in left[:1] if left and not left[0].startswith("--") else list_unknown(left):
        if find_effect(word) is None:
            parser.parse_flags([word])  # raises an error that suggests the most similar flag
    warn_of_unparsed(left, parser, parser.source)
    overridden = {*VIRTUAL_STAGE_FLAGS} if any(name in typed_values for name in VIRTUAL_STAGE_FLAGS) else set()
    if vars(typed_values).get("num_virtual_stages_per_pipeline_rank") == 1:
        overridden.add("microbatch_group_size_per_virtual_pipeline_stage")  # no effect with one chunk per rank
    values = {name: value for name, value in vars(parsed).items() if name not in overridden} | vars(typed_values)
    if not values.keys() & {"vocab_size", "padded_vocab_size"} and (size := find_vocab_size(flags, source)):
        values["vocab_size"] = size
    return values


def _assume_sequence_parallel(values: dict[str, Any]) -> bool:
    """Enable sequence parallelism with tensor parallelism unless a flag sets it. Return whether this changed `values`."""
    if values.get("tensor_model_parallel_size", 1) <= 1 or "sequence_parallel" in values:
        return False
    values["sequence_parallel"] = True
    return True


def _make_model(values: Mapping[str, Any], *, name: str) -> ModelShape:
    num_layers, heads = values["num_layers"], values["num_attention_heads"]
    if values.get("bf16") and values.get("fp16"):
        raise ConfigError("--bf16 and --fp16 are mutually exclusive. Use only one; --no-bf16 or --no-fp16 overrides a file.")
    experts = make_experts(values)
    is_gated = any(values.get(flag, False) for flag in ("swiglu", "quick_geglu", "gated_linear_unit"))
    moe_layers = None if experts is None else list_moe_layers(values.get("moe_layer_freq", 1), num_layers=num_layers)
    latent = _make_latent(values)
    if values.get("quick_geglu") and not values.get("bias_swiglu_fusion", True):
        raise ConfigError(
            "--no-bias-swiglu-fusion with --quick-geglu: the saved bytes of the unfused activation are unknown. Remove "
            "--no-bias-swiglu-fusion, or pass --swiglu."
        )
    model = ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=values["hidden_size"],
        ffn_hidden_size=_find_ffn_hidden_size(values, is_gated=is_gated, has_dense_layers=not all(moe_layers or (False,))),
        num_attention_heads=heads,
        num_query_groups=_find_query_groups(values) if latent is None else heads,
        kv_channels=_find_kv_channels(values) if latent is None else 0,
        vocab_size=values.get("padded_vocab_size") or _pad(values, values.get("vocab_size", _DEFAULT_VOCAB_SIZE)),
        seq_length=values["seq_length"],
        normalization=values.get("normalization", "LayerNorm"),
        is_gated=is_gated,
        has_quick_gate=values.get("quick_geglu", False),
        has_tied_embeddings=not values.get("untie_embeddings_and_output_weights", False),
        has_linear_bias=not values.get("disable_bias_linear", False),
        has_qkv_bias=values.get("add_qkv_bias", False),
        has_qk_norm=values.get("qk_layernorm", False),
        has_attention_sinks=values.get("softmax_type") == "learnable",
        latent=latent,
        experts=experts,
        moe_layers=moe_layers,
        has_hidden_dropout=True,  # unless a flag changes it
        activation_dtype_bytes=2 if values.get("bf16") or values.get("fp16") else 4,
        **_find_positions(values),
        **_find_window(values, num_layers),
    )
    return dataclasses.replace(model, **_find_changes(values))


def _change_model(model: ModelShape, values: Mapping[str, Any]) -> ModelShape:
    """Return `model`, which comes from another source, with the changes that flags request."""
    for name in values:
        if name in _SET_BY_CONFIGURATION.split():
            raise ConfigError(f"{to_flag(name)} is set by the configuration of {model.name}. Remove it.")
        if name.startswith("moe_") and model.experts is None:
            raise ConfigError(f"{to_flag(name)} is for experts, but {model.name} has none. Remove it.")
    if model.has_quick_gate and not values.get("bias_swiglu_fusion", True):
        raise ConfigError(
            f"--no-bias-swiglu-fusion with {model.name}, which uses quick GEGLU: the saved bytes of the unfused activation are "
            "unknown. Remove --no-bias-swiglu-fusion."
        )
    experts = None if model.experts is None else change_experts(model.experts, values)
    padded = _pad(values, model.vocab_size)
    return dataclasses.replace(model, experts=experts, vocab_size=padded, **_find_changes(values))


def _find_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values of the fields that flags can change in a model from any source."""
    changes = {name: values[name] for name in ("seq_length", "mtp_num_layers") if name in values}
    if "rope_fusion" in values:
        changes["has_fused_rotary"] = values["rope_fusion"]
    if "bias_swiglu_fusion" in values:
        changes["has_fused_activation"] = values["bias_swiglu_fusion"]
    if "hidden_dropout" in values:
        if not 0 <= values["hidden_dropout"] <= 1:
            raise ConfigError(f"--hidden-dropout {values['hidden_dropout']} is not a probability. Use a number from 0 to 1.")
        changes["has_hidden_dropout"] = values["hidden_dropout"] > 0
    if "fp8_format" in values:
        changes["fp8_recipe"] = values.get("fp8_recipe", "delayed")
    return changes


def _make_latent(values: Mapping[str, Any]) -> LatentAttention | None:
    if not values.get("multi_latent_attention"):
        return None
    if "kv_lora_rank" not in values:
        raise ConfigError(
            "--kv-lora-rank is missing, but --multi-latent-attention needs it. Pass it, for example --kv-lora-rank 512."
        )
    sizes = {name: values.get(name, default) for name, default in _LATENT_DEFAULTS.items()}
    return LatentAttention(q_lora_rank=values.get("q_lora_rank"), kv_lora_rank=values["kv_lora_rank"], **sizes)


def _find_query_groups(values: Mapping[str, Any]) -> int:
    if values.get("group_query_attention"):
        return int(values.get("num_query_groups", 1))
    if "num_query_groups" in values:
        raise ConfigError(
            f"--num-query-groups {values['num_query_groups']} has no effect without --group-query-attention. "
            "Add that flag, or remove --num-query-groups."
        )
    return int(values["num_attention_heads"])


def _find_kv_channels(values: Mapping[str, Any]) -> int:
    hidden_size, heads = values["hidden_size"], values["num_attention_heads"]
    # `ModelShape` rejects fewer than one head.
    if "kv_channels" not in values and heads > 0 and hidden_size % heads:
        raise ConfigError(
            f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {heads}. Use a multiple, or set the "
            "channels per head with --kv-channels."
        )
    return int(values.get("kv_channels", hidden_size // max(1, heads)))


def _find_ffn_hidden_size(values: Mapping[str, Any], *, is_gated: bool, has_dense_layers: bool) -> int:
    if "ffn_hidden_size" in values:
        return int(values["ffn_hidden_size"])
    if not has_dense_layers:
        return 0
    if is_gated:
        raise ConfigError(
            "--ffn-hidden-size is missing; Megatron-LM and Megatron-Core have different defaults for a gated MLP. Pass it, "
            f"for example --ffn-hidden-size {4 * values['hidden_size']}."
        )
    return 4 * int(values["hidden_size"])


def _find_positions(values: Mapping[str, Any]) -> dict[str, Any]:
    default = "rope" if values.get("use_rotary_position_embeddings") else "learned_absolute"
    kind = values.get("position_embedding_type", default)
    if kind == "learned_absolute":
        positions = values.get("max_position_embeddings", values["seq_length"])
        if positions < values["seq_length"]:
            raise ConfigError(
                f"--max-position-embeddings {positions} is below --seq-length {values['seq_length']}. "
                f"Use {values['seq_length']} or more."
            )
        return {"learned_positions": positions, "rotary_percent": 0.0}
    # Megatron's fused kernel does not support the scale factor of YaRN.
    return {"rotary_percent": 0.0 if kind == "none" else values.get("rotary_percent", 1.0), "has_fused_rotary": kind != "yarn"}


def _find_window(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    # -1 means an unlimited window.
    tokens = values.get("window_size", (-1, 0))[0]
    if tokens == -1:
        return {}
    pattern = values.get("window_attn_skip_freq")
    layers = None if pattern is None else list_window_layers(pattern, num_layers=num_layers)
    return {"window_tokens": tokens, "window_layers": layers}


def _pad(values: Mapping[str, Any], vocab_size: int) -> int:
    return pad_vocab_size(
        vocab_size,
        divisible_by=values.get("make_vocab_size_divisible_by", 128),
        tensor_parallel_size=values.get("tensor_model_parallel_size", 1),
    )
