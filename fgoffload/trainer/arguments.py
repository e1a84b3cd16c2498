"""Parses the flags of `fgoffload train`: Megatron's model flags, training flags and offload flags.

The model flags are derived from the fields of Megatron's config classes, and the training flags from the fields of
`TrainingArguments`. This file lists only the exceptions, such as Megatron-LM's flags that are not named after a field.
"""

import argparse
import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.adapter.model_config import list_accepted
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser, add_field_flags, to_flag, whole_number
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE, FlagSources
from fgoffload.integrations.megatron.flags.graph_flags import GRAPH_FIELDS, add_graph_flags, read_graph_fields, to_config_fields
from fgoffload.integrations.megatron.flags.other_flags import has_no_effect
from fgoffload.integrations.megatron.flags.parallel_flags import count_chunks
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments, count_processes

_logger = logging.getLogger(__name__)

_CONFIG_MODULE = "megatron.core.transformer.transformer_config"

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_moe_experts": ("--num-experts",),
    "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers",),
    "virtual_pipeline_model_parallel_size": ("--num-virtual-stages-per-pipeline-rank",),
    "overlap_p2p_comm": ("--overlap-p2p-communication",),
    "apply_rope_fusion": ("--rope-fusion",),
    "bias_activation_fusion": ("--bias-swiglu-fusion", "--bias-gelu-fusion"),
    "fp8_param": ("--fp8-param-gather",),
    "use_te_rng_tracker": ("--te-rng-tracker",),
}
"""Megatron-LM's flags whose names differ from the config field that they set, keyed by field."""

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Megatron-LM fuses SwiGLU by default, and the fused kernel saves less for backward.
    "--swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bias_activation_fusion": True},
    "--recompute-activations": {"recompute_granularity": "selective"},
}
"""Config fields and values that one Megatron-LM flag sets, keyed by flag. A field's own flag takes precedence."""

_NEVER_IGNORED = ("--nproc", "--nnodes", "--help")
"""Prefixes of flags that raise an error, since ignoring a request for several processes or for help would mislead the user."""

_OPTIMIZER_FLAGS = frozenset(
    f"--{name}"
    for name in (
        *("use-distributed-optimizer", "use-precision-aware-optimizer", "optimizer", "grad-reduce-in-bf16"),
        *("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
    )
)
"""Flags that the planner reads but the trainer, which has its own optimizer, ignores."""

_OFFLOAD_FIELDS = {field.name for field in dataclasses.fields(OffloadConfig)} | {"fine_grained_activation_offloading"}
"""Fields of Megatron's config for which `add_fine_grained_offload_args` adds the flags."""

_MLA_FIELDS_OF_TRAINING = frozenset({"rotary_base", "rotary_percent"})
"""Fields of Megatron's latent-attention config that are fields of `TrainingArguments`, since they apply to all models."""

_MLA_DEFAULTS: Mapping[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "normalization": "LayerNorm",
}
"""Megatron-LM's defaults for latent attention, which differ from those of Megatron-Core's config. Source: `_add_mla_args` in
megatron/training/arguments.py, and `TransformerConfig` for norms, both in 0.16.1 and unchanged in 0.20."""

_REQUIRED = {"seq_length": 256, "micro_batch_size": 1, "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8}
"""Required fields, each with an example value for the error message."""


def parse_arguments(
    argv: Sequence[str],
    *,
    source: str,
    world_size: int | None = None,
    typed: Sequence[str] = (),
    known_elsewhere: Collection[str] = (),
) -> TrainingArguments:
    """Parse the flags of a training run.

    Args:
        argv: Flags of Megatron-LM. Later flags override earlier ones.
        source: Where `argv` comes from, for error messages.
        world_size: Number of processes. None means the minimum for one copy of the model.
        typed: Additional flags from the command line, which override `argv`.
        known_elsewhere: Command-line flags that other code parses. Error messages may suggest them after a typo.

    Raises:
        ConfigError: A flag is unknown or has an invalid value. The message contains the source, the flag and a fix.
    """
    parser, typed_parser = _build_parser(source), _build_parser(COMMAND_LINE, known_elsewhere)
    values = _parse_and_skip(typed_parser, typed, earlier=_parse_and_skip(parser, argv))
    given = {flag: source for flag in parser.find_given(argv)} | {flag: COMMAND_LINE for flag in typed_parser.find_given(typed)}
    sources = FlagSources((source, COMMAND_LINE) if typed else (source,), MappingProxyType(given))
    try:
        offload = OffloadConfig.from_flags(argparse.Namespace(**values))
    except ConfigError as error:
        raise sources.refuse(str(error)) from error
    if offload is None and values.get("offload_modules") and "--fine-grained-activation-offloading" not in given:
        _logger.warning(
            "--offload-modules has no effect without --fine-grained-activation-offloading. Add this flag to enable offload."
        )
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    training = {name: value for name, value in values.items() if name in names}
    if values["use_rotary_position_embeddings"]:
        training.setdefault("position_embedding_type", "rope")
    transformer = _collect_transformer_fields(values, sources)
    for name, example in _REQUIRED.items():
        if name not in training and name not in transformer:
            raise sources.refuse(f"{to_flag(name)} is missing. Add it, for example {to_flag(name)} {example}.")
    model_size, experts_size = count_processes(transformer)
    world_size = math.lcm(model_size, experts_size) if world_size is None else world_size
    training.setdefault("max_position_embeddings", training["seq_length"])
    # Megatron-LM's default: one microbatch per step on every data-parallel rank.
    training.setdefault("global_batch_size", max(1, training["micro_batch_size"]) * max(1, world_size // model_size))
    return TrainingArguments(
        transformer=MappingProxyType(transformer), offload=offload, source=sources, world_size=world_size, **training
    )


def build_transformer_config(arguments: TrainingArguments, *, offload: OffloadConfig | None) -> Any:
    """Return Megatron's TransformerConfig for `arguments`. Omits offload tags that Megatron does not accept.

    Raises:
        ConfigError: Megatron rejects the combination of flags. The error includes Megatron's message.
    """
    module = load_module(_CONFIG_MODULE)
    fields = dict(arguments.transformer)
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float16 if fields.get("fp16") else torch.float32
    # With two stages, the interleaved schedule sends to the same rank in both directions. Batched sends are matched only by
    # order and would silently swap an activation and a gradient. Overlapped sends use two groups, as in Megatron-LM.
    fields.setdefault("overlap_p2p_comm", arguments.virtual_pipeline_size is not None)
    fields.setdefault("transformer_impl", "local")
    fields |= {"batch_p2p_comm": not fields["overlap_p2p_comm"], "params_dtype": dtype, "pipeline_dtype": dtype}
    known = {field.name for field in dataclasses.fields(module.TransformerConfig)}
    fields = to_config_fields(fields, known) | {"use_te_rng_tracker": arguments.uses_te_rng_tracker}
    accepted = [] if offload is None else list_accepted(offload.offload_modules)
    if offload is not None and accepted:
        fields |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": accepted,
            "min_offloaded_tensor_size": offload.min_offloaded_tensor_size,
        }
        if "delay_offload_until_cuda_graph" in known:
            fields["delay_offload_until_cuda_graph"] = offload.delay_offload_until_cuda_graph
    config_class = module.TransformerConfig
    if fields.get("multi_latent_attention"):
        config_class = module.MLATransformerConfig
        rotary = {"rotary_base": arguments.rotary_base, "rotary_percent": arguments.rotary_percent}
        fields = {**_MLA_DEFAULTS, **fields, **rotary}
    try:
        with ignore_expected_warnings():
            return config_class(**fields)
    except (ValueError, AssertionError, NotImplementedError, TypeError) as error:
        raise arguments.source.refuse(f"Megatron-Core rejects this combination of flags: {error}") from error


def _build_parser(source: str, known_elsewhere: Collection[str] = ()) -> FlagParser:
    module = load_module(_CONFIG_MODULE)
    model_fields = {field.name for field in dataclasses.fields(module.TransformerConfig)}
    parser = FlagParser(source=source, known_elsewhere=known_elsewhere)
    add_fine_grained_offload_args(parser)
    add_field_flags(parser, TrainingArguments, leave_out=("transformer", "offload", "source", "world_size"))
    add_field_flags(parser, module.TransformerConfig, leave_out=_OFFLOAD_FIELDS | GRAPH_FIELDS, aliases=_ALIASES)
    add_graph_flags(parser)
    add_field_flags(parser, module.MLATransformerConfig, leave_out=model_fields | _MLA_FIELDS_OF_TRAINING)
    parser.add_argument("--use-rotary-position-embeddings", action="store_true", default=False)
    parser.add_argument("--group-query-attention", action="store_true", default=False)
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=whole_number)
    for flag in _PRESETS:
        parser.add_argument(flag, action="store_true", default=False)
    return parser


def _parse_and_skip(parser: FlagParser, words: Sequence[str], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of the flags, and log one warning about all ignored flags."""
    values, left = parser.parse_known_args(list(words), argparse.Namespace(**(earlier or {})))
    ignored: list[str] = []
    skips = False
    for word in left:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            is_ignored = has_no_effect(flag) or flag.replace("--no-", "--") in _OPTIMIZER_FLAGS
            skips = is_ignored and not flag.startswith(_NEVER_IGNORED)
            if skips and flag not in ignored:
                ignored.append(flag)
        if not skips:
            parser.parse_flags([word])  # raises an error for an unknown flag
    if ignored:
        _logger.warning("%s: this command ignores flags that its trainer does not need: %s", parser.source, " ".join(ignored))
    return vars(values)


def _collect_transformer_fields(values: Mapping[str, Any], sources: FlagSources) -> dict[str, Any]:
    """Return the fields of Megatron's config that the flags set."""
    module = load_module(_CONFIG_MODULE)
    known = {field.name for field in dataclasses.fields(module.TransformerConfig)}
    latent_only = {field.name for field in dataclasses.fields(module.MLATransformerConfig)} - known - _MLA_FIELDS_OF_TRAINING
    fields: dict[str, Any] = {}
    for flag, preset in _PRESETS.items():
        if values[flag[2:].replace("-", "_")]:
            fields |= preset
    fields |= {name: value for name, value in values.items() if name in (known | latent_only) - _OFFLOAD_FIELDS - GRAPH_FIELDS}
    fields |= read_graph_fields(values)
    if (latent := latent_only & fields.keys()) and not fields.get("multi_latent_attention"):
        raise sources.refuse(f"{to_flag(min(latent))} has no effect without --multi-latent-attention. Add this flag.")
    if values["group_query_attention"]:
        fields.setdefault("num_query_groups", 1)
    elif "num_query_groups" in fields:
        raise sources.refuse(
            f"--num-query-groups {fields['num_query_groups']} has no effect without --group-query-attention. Add this flag."
        )
    virtual, stages = "virtual_pipeline_model_parallel_size", fields.get("pipeline_model_parallel_size", 1)
    if "num_layers_per_virtual_pipeline_stage" in values:
        both = {**values, "num_virtual_stages_per_pipeline_rank": fields.get(virtual)}
        try:
            fields[virtual] = count_chunks(both, fields.get("num_layers", 0), max(1, stages))
        except ConfigError as error:
            raise sources.refuse(str(error)) from error
    if (fields.get(virtual) or 1) > 1 and stages < 2:
        raise sources.refuse(
            "the interleaved schedule (virtual pipeline) needs at least 2 stages. "
            "Add --pipeline-model-parallel-size 2 or remove the virtual pipeline."
        )
    return fields
