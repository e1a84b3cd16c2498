"""Lists the settings of a training run that a plan depends on. A run with other settings rejects the plan.

The list omits the choice of bf16 or fp16 and the FP8 format, because they change neither sizes nor speed. It omits the settings
for gradient and optimizer memory, because they are not in Megatron's model config.
"""

from fgoffload.plan import FP8_RECIPE, MICROBATCHES, NO_FP8, PARAMETER_BYTES, TOKENS
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism


def list_facts(model: ModelShape, parallelism: Parallelism) -> dict[str, int | str]:
    """Return the settings for `OffloadPlan.made_for`, keyed by Megatron's config names. Omit those that the model lacks."""
    sizes = parallelism
    facts: dict[str, int | str] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_moe_experts": 0 if model.experts is None else model.experts.num_experts,
        "mtp_num_layers": model.mtp_num_layers,
        "normalization": model.normalization,
        "gated_linear_unit": int(model.is_gated),
        "qk_layernorm": int(model.has_qk_norm),
        "tensor_model_parallel_size": sizes.tensor_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": sizes.chunks,
        "context_parallel_size": sizes.context_parallel_size,
        "expert_model_parallel_size": sizes.expert_parallel_size,
        PARAMETER_BYTES: model.activation_dtype_bytes,
        FP8_RECIPE: model.fp8_recipe or NO_FP8,
    }
    if model.experts is None or not all(model.moe_layers or ()):
        facts["ffn_hidden_size"] = model.ffn_hidden_size
    if model.latent is None:
        facts |= {"num_query_groups": model.num_query_groups, "kv_channels": model.kv_channels}
    else:
        facts |= {
            "q_lora_rank": model.latent.q_lora_rank or 0,
            "kv_lora_rank": model.latent.kv_lora_rank,
            "qk_head_dim": model.latent.qk_head_dim,
            "qk_pos_emb_head_dim": model.latent.qk_pos_emb_head_dim,
            "v_head_dim": model.latent.v_head_dim,
        }
    if model.experts is not None:
        facts |= {
            "moe_router_topk": model.experts.topk,
            "moe_ffn_hidden_size": model.experts.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.experts.shared_ffn_hidden_size,
            "expert_tensor_parallel_size": sizes.expert_tensor_parallel_size,
            "overlap_moe_expert_parallel_comm": int(sizes.has_expert_overlap),
        }
    if sizes.tensor_parallel_size > 1:
        facts["sequence_parallel"] = int(sizes.has_sequence_parallel)
    if sizes.chunks > 1:
        facts["microbatch_group_size_per_vp_stage"] = sizes.pipeline.microbatches_of_group
    if not sizes.pipeline.is_full:
        facts[MICROBATCHES] = sizes.microbatches
    return {**facts, TOKENS: sizes.micro_batch_size * model.seq_length}
