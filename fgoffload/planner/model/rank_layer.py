"""Builds the shape of a layer on a rank from a model and its parallel sizes."""

import dataclasses

from fgoffload.errors import ConfigError
from fgoffload.planner.model.layer_shape import LatentShape, LayerShape
from fgoffload.planner.model.model_shape import ModelShape, check_head_channels
from fgoffload.planner.model.parallelism import Parallelism


def make_layer_shape(model: ModelShape, parallelism: Parallelism, number: int) -> LayerShape:
    """Return the shape of layer `number` on a rank. Multi-token prediction's transformer layer gets `has_mtp_projection`."""
    has_experts = model.has_experts(number)
    parallelism.check_model(model)
    if model.activation_dtype_bytes != 2:
        raise ConfigError("the model has fp32 activations, but the planner supports only bf16 and fp16. Use --bf16 or --fp16.")
    check_head_channels(model)
    experts = None
    if model.experts is not None and has_experts:
        experts = dataclasses.replace(
            model.experts,
            expert_parallel_size=parallelism.expert_parallel_size,
            expert_tensor_parallel_size=parallelism.expert_tensor_parallel_size,
        )
    return LayerShape(
        micro_batch_size=parallelism.micro_batch_size,
        seq_length=model.seq_length // parallelism.context_parallel_size,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        qk_channels=model.qk_channels,
        v_channels=model.v_channels,
        ffn_hidden_size=0 if has_experts else model.ffn_hidden_size,
        experts=experts,
        latent=_make_latent(model),
        tensor_parallel_size=parallelism.tensor_parallel_size,
        has_sequence_parallel=parallelism.has_sequence_parallel,
        normalization=model.normalization,
        rotary_channels=model.rotary_channels,
        has_fused_rotary=model.has_fused_rotary and model.rotary_channels > 0,
        has_qk_norm=model.has_qk_norm and model.latent is None,
        is_gated=model.is_gated,
        has_fused_activation=model.has_fused_activation or not model.is_gated,
        has_linear_bias=model.has_linear_bias,
        has_attention_sinks=model.has_attention_sinks,
        has_clamped_gate=model.has_quick_gate,
        has_hidden_dropout=model.has_hidden_dropout,
        has_mtp_projection=number >= model.num_layers,
        fp8_recipe=model.fp8_recipe,
    )


def _make_latent(model: ModelShape) -> LatentShape | None:
    if model.latent is None:
        return None
    return LatentShape(
        q_lora_rank=model.latent.q_lora_rank,
        kv_lora_rank=model.latent.kv_lora_rank,
        qk_pos_emb_head_dim=model.latent.qk_pos_emb_head_dim,
        has_qk_norm=model.has_qk_norm,
    )
