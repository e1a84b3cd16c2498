"""Parses the flags of `fgoffload train`: Megatron's model flags, training flags and offload flags.

The model flags are the fields of Megatron's config classes (see `field_flags.py`), the training flags are the fields of
`TrainingArguments`. This file only lists flags that Megatron-LM spells differently from the field.
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
from fgoffload.integrations.megatron.flags.parallel_flags import describe_two_virtual_sizes
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments

__all__ = ["TrainingArguments", "build_transformer_config", "parse_arguments"]

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
"""Megatron-LM's spelling of flags by config field, where it differs from the field. Each boolean flag has a `--no-` form:
`--no-bias-swiglu-fusion`."""

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Megatron-LM fuses SwiGLU by default. The fused kernel saves less for backward, so the default matters here.
    "--swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bias_activation_fusion": True},
    "--recompute-activations": {"recompute_granularity": "selective"},
}
"""Flags of Megatron-LM that set several fields. A flag for one of these fields overrides the preset."""

_LAUNCHER = ("--nproc", "--nnodes", "--help")
"""Prefixes of flags that the trainer must not ignore, since the user expects more processes or the help."""

_OF_OPTIMIZER = frozenset(
    f"--{name}"
    for name in (
        *("use-distributed-optimizer", "use-precision-aware-optimizer", "optimizer", "grad-reduce-in-bf16"),
        *("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
    )
)
"""Flags that a plan reads and the trainer ignores, since it has an optimizer of its own."""

_MOST_SHOWN = 20
"""Maximum number of ignored flags that a warning names."""

_OFFLOAD_FIELDS = frozenset(
    {
        "fine_grained_activation_offloading",
        "offload_modules",
        "min_offloaded_tensor_size",
        # Since 0.19:
        "delay_offload_until_cuda_graph",
        "delta_offload_bytes_across_pp_ranks",
        "activation_offload_fraction",
    }
)
"""Fields of Megatron's config that `add_fine_grained_offload_args` covers."""

_MLA_FIELDS_OF_TRAINING = frozenset({"rotary_base", "rotary_percent"})
"""Fields of Megatron's latent-attention config that are training flags for every model with rotary embeddings."""

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
"""Defaults of absent flags with latent attention. The config's own defaults describe another model. For example, it projects
queries through a rank of 512, where Megatron-LM projects them directly. Source: `_add_mla_args` of
megatron/training/arguments.py, and for norms `TransformerConfig`, of Megatron-LM core 0.16.1; unchanged in 0.20."""

_REQUIRED = {"seq_length": 256, "micro_batch_size": 1, "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8}
"""Fields that must be given, with examples."""


def parse_arguments(
    argv: Sequence[str],
    *,
    source: str,
    world_size: int | None = None,
    typed: Sequence[str] = (),
    known_elsewhere: Collection[str] = (),
) -> TrainingArguments:
    """Parse the training that `argv` describes.

    Args:
        argv: Flags as Megatron-LM takes them. Later flags override earlier ones.
        source: Source of the flags, for errors.
        world_size: Number of processes; None takes the fewest that one copy of the model needs.
        typed: Further flags from the command line, which override `argv`.
        known_elsewhere: Command-line flags that other code parses, for suggestions.

    Raises:
        ConfigError: A flag is unknown or has an invalid value; the error names source, flag, value and fix.
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
            "--offload-modules has no effect without --fine-grained-activation-offloading. Add that flag to offload."
        )
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    training = {name: value for name, value in values.items() if name in names}
    if values["use_rotary_position_embeddings"]:
        training.setdefault("position_embedding_type", "rope")
    transformer = _collect_transformer_fields(values, sources)
    for name, example in _REQUIRED.items():
        if name not in training and name not in transformer:
            raise sources.refuse(f"{to_flag(name)} is missing. Give it, as in {to_flag(name)} {example}.")
    world_size = max(1, _count_processes(transformer)) if world_size is None else world_size
    training.setdefault("max_position_embeddings", training["seq_length"])
    # Megatron-LM's default: one microbatch per step on every data-parallel rank.
    training.setdefault(
        "global_batch_size",
        max(1, training["micro_batch_size"]) * max(1, world_size // max(1, _count_model_parallel(transformer))),
    )
    return TrainingArguments(
        transformer=MappingProxyType(transformer), offload=offload, source=sources, world_size=world_size, **training
    )


def build_transformer_config(arguments: TrainingArguments, *, offload: OffloadConfig | None) -> Any:
    """Return Megatron's TransformerConfig for `arguments`.

    Args:
        arguments: The training.
        offload: Offload options; None disables offload. Megatron receives the tags that its config accepts, and only the engine
            receives the others. If Megatron accepts none, its own flag is off.

    Raises:
        ConfigError: Megatron refuses the combination. The error includes Megatron's message.
    """
    module = load_module(_CONFIG_MODULE)
    fields = dict(arguments.transformer)
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float16 if fields.get("fp16") else torch.float32
    # With two stages, the interleaved schedule sends to one neighbour in both directions. Batched sends match by order only and
    # would silently swap an activation for a gradient; overlapped sends use two groups. Megatron-LM does the same.
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
        raise arguments.source.refuse(f"Megatron-Core refuses this combination of flags: {error}") from error


def _build_parser(source: str, known_elsewhere: Collection[str] = ()) -> FlagParser:
    module = load_module(_CONFIG_MODULE)
    model_fields = {field.name for field in dataclasses.fields(module.TransformerConfig)}
    parser = FlagParser(source=source, known_elsewhere=known_elsewhere)
    add_fine_grained_offload_args(parser)
    add_field_flags(parser, TrainingArguments, leave_out=("transformer", "offload", "source", "world_size"))
    # BooleanOptionalAction adds the --no- form to each spelling. Megatron-LM uses it for most booleans that are on by default.
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
    """Return the values of the flags, and name those that this training ignores in one warning."""
    values, left = parser.parse_known_args(list(words), argparse.Namespace(**(earlier or {})))
    ignored: list[str] = []
    skips = False
    for word in left:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            skips = not flag.startswith(_LAUNCHER) and (has_no_effect(flag) or flag.replace("--no-", "--") in _OF_OPTIMIZER)
            if skips and flag not in ignored:
                ignored.append(flag)
        if not skips:
            parser.parse_flags([word])  # raises, and names the most similar flag
    if ignored:
        shown = " ".join(ignored[:_MOST_SHOWN]) + (f" and {len(ignored) - _MOST_SHOWN} more" if ignored[_MOST_SHOWN:] else "")
        _logger.warning("%s: this command ignores %s, which its small trainer does not need.", parser.source, shown)
    return vars(values)


def _collect_transformer_fields(values: Mapping[str, Any], sources: FlagSources) -> dict[str, Any]:
    """Return the given fields of Megatron's config, with Megatron-LM's flags translated."""
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
        raise sources.refuse(
            f"{to_flag(min(latent))} has no effect without --multi-latent-attention. Add that or leave it out."
        )
    if values["group_query_attention"]:
        fields.setdefault("num_query_groups", 1)
    elif "num_query_groups" in fields:
        raise sources.refuse(
            f"--num-query-groups {fields['num_query_groups']} has no effect without --group-query-attention. "
            "Add that or leave it out."
        )
    if "num_layers_per_virtual_pipeline_stage" in values:
        fields["virtual_pipeline_model_parallel_size"] = _count_chunks(values, fields, sources)
    if (fields.get("virtual_pipeline_model_parallel_size") or 1) > 1 and fields.get("pipeline_model_parallel_size", 1) < 2:
        raise sources.refuse(
            "the interleaved schedule (virtual pipeline) needs 2 stages or more. "
            "Give --pipeline-model-parallel-size 2 or leave the virtual pipeline out."
        )
    return fields


def _count_chunks(values: Mapping[str, Any], fields: Mapping[str, Any], sources: FlagSources) -> int | None:
    """Return the virtual pipeline size for `--num-layers-per-virtual-pipeline-stage`."""
    per_chunk = int(values["num_layers_per_virtual_pipeline_stage"])
    if (chunks := fields.get("virtual_pipeline_model_parallel_size")) is not None:
        raise sources.refuse(describe_two_virtual_sizes(per_chunk, chunks))
    layers, stages = int(fields.get("num_layers", 0)), int(fields.get("pipeline_model_parallel_size", 1))
    if per_chunk < 1 or stages < 1 or layers % (stages * per_chunk):
        raise sources.refuse(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} x {stages} stages does not divide --num-layers "
            f"{layers}. Give a number of layers per chunk that divides the {layers // max(1, stages)} layers of a stage."
        )
    return layers // (stages * per_chunk)


def _count_model_parallel(transformer: Mapping[str, Any]) -> int:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tensor, pipeline, context = (int(transformer.get(name, 1)) for name in sizes)
    return tensor * pipeline * context


def _count_processes(transformer: Mapping[str, Any]) -> int:
    """Return the fewest processes that hold whole copies of the model and all of its experts."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    tensor, pipeline, expert = (int(transformer.get(name, 1)) for name in sizes)
    experts = expert * pipeline * int(transformer.get("expert_tensor_parallel_size") or tensor)
    return math.lcm(max(1, _count_model_parallel(transformer)), max(1, experts))
