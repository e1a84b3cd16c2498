"""Sets Megatron's own offload flags in each model config created after `apply`, and reads the fields that plans depend on.

Megatron's config rejects unknown tags and an empty list. So we set only the tags that it accepts, and turn its flag off if it
accepts none. The sites that we add work without the flag.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.plan import FP8_RECIPE, NO_FP8, PARAMETER_BYTES

logger = logging.getLogger(__name__)

CONFIG_MODULE = "megatron.core.transformer.transformer_config"

_SETTINGS = ("min_offloaded_tensor_size", "activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")
_OP_FUSER = "use_transformer_engine_op_fuser"

_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_moe_experts", "ffn_hidden_size", "num_query_groups"),
    *("kv_channels", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "mtp_num_layers"),
)
_SWITCHES = ("sequence_parallel", "gated_linear_unit", "qk_layernorm", "overlap_moe_expert_parallel_comm")
_GROUPS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    "microbatch_group_size_per_vp_stage",
)
_FACTS: dict[str, int | str] = {
    **dict.fromkeys((*_SIZES, *_SWITCHES), 0),
    **dict.fromkeys(_GROUPS, 1),
    "normalization": "LayerNorm",
}
"""Config fields that a plan may list in `made_for`, with defaults that replace None. Values get the default's type."""


def read_facts(config: Any) -> dict[str, int | str]:
    """Return the config fields that a plan depends on. See `OffloadPlan.made_for`."""
    facts: dict[str, int | str] = {PARAMETER_BYTES: _count_parameter_bytes(config), FP8_RECIPE: NO_FP8}
    if getattr(config, "fp8", None):
        recipe = getattr(config, "fp8_recipe", "delayed")
        facts[FP8_RECIPE] = str(getattr(recipe, "value", recipe))  # an Enum in some versions
    for name, absent in _FACTS.items():
        value = getattr(config, name, None)
        facts[name] = absent if value is None else type(absent)(value)
    return facts


def _count_parameter_bytes(config: Any) -> int:
    # `bf16` and `fp16` override `params_dtype`, because Megatron's wrapper converts the model to that type.
    if getattr(config, "bf16", False) or getattr(config, "fp16", False):
        return 2
    return int(getattr(config, "params_dtype", torch.float32).itemsize)


def set_flags(patches: Patches, ours: OffloadConfig, selected: Sequence[str]) -> None:
    """Set Megatron's flags for the `selected` tags in every config created from now on. They override the config's values."""
    accepted = list_accepted(selected)

    def set_and_check(original: Any, config: Any) -> None:
        # Megatron's whole-layer offload conflicts with ours. `layers.py` rejects the model in its first forward.
        if not getattr(config, "cpu_offloading", False):
            if config.fine_grained_activation_offloading:
                _warn_of_ignored(config, ours, selected)
            config.fine_grained_activation_offloading, config.offload_modules = bool(accepted), list(accepted)
            patches.callback(_switch_off, weakref.ref(config))
        original(config)

    wrap_symbol(patches, f"{CONFIG_MODULE}:TransformerConfig", "__post_init__", set_and_check)


def _warn_of_ignored(config: Any, ours: OffloadConfig, selected: Sequence[str]) -> None:
    message = "%s=%s in a TransformerConfig has no effect, because offload was applied with %s."
    if ignored := set(config.offload_modules or ()) - set(selected):
        logger.warning(message, "offload_modules", " ".join(sorted(ignored)), " ".join(selected) or "no tags")
    for name in _SETTINGS:
        given, default, own = getattr(config, name, None), getattr(type(config), name, None), getattr(ours, name)
        if given not in (default, own):
            logger.warning(message, name, given, own)


def _switch_off(reference: "weakref.ref[Any]") -> None:
    config = reference()
    if config is not None:
        config.fine_grained_activation_offloading, config.offload_modules = False, []


def list_accepted(tags: Sequence[str]) -> list[str]:
    """Return the tags that Megatron's config accepts."""
    return [tag for tag in tags if _is_accepted(tag)]


@functools.cache
def _is_accepted(tag: str) -> bool:
    """Return whether Megatron's config accepts `tag`. Tries a tiny config, whose validation checks the tag."""
    config_class = load_module(CONFIG_MODULE).TransformerConfig
    check = inspect.unwrap(config_class.__post_init__)  # Megatron's own method, even if `set_flags` has wrapped it
    probe = type("Probe", (config_class,), {"__post_init__": check})
    fields = {
        "num_layers": 1,
        "hidden_size": 1,
        "num_attention_heads": 1,
        "fine_grained_activation_offloading": True,
        # Megatron rejects attn_proj without core_attn. Every version accepts core_attn.
        "offload_modules": ["core_attn", tag],
    }
    # Megatron rejects fused_group_mlp without the op fuser, which older versions lack.
    has_fuser = any(field.name == _OP_FUSER for field in dataclasses.fields(config_class))
    for options in ({}, {_OP_FUSER: True} if has_fuser else {}):
        with contextlib.suppress(AssertionError, ValueError), ignore_expected_warnings():
            probe(**fields, **options)
            return True
    return False
