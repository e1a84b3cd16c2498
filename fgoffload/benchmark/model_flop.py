"""Counts the floating-point operations that the model needs for a step, without recompute.

A multiplication and an addition are two operations. Backward costs twice as much as forward. Recompute does not count, so
utilization falls when a setting recomputes. Attention is causal, so each token attends to half of its sequence. Only matrix
products count, with the padded vocabulary. Windows and packed sequences, where each token attends to fewer, are not modeled.

Source: the same conventions as `num_floating_point_operations` of Megatron-LM's training.py.
"""

from typing import Any

from fgoffload.trainer.training_arguments import TrainingArguments

_PASSES = 3
"""Number of passes: forward, backward for inputs, and backward for weights."""


def count_model_flop(arguments: TrainingArguments, config: Any) -> int:
    """Return the operations of one step, summed over all ranks.

    Args:
        arguments: The training.
        config: Megatron's TransformerConfig of the training, with defaults filled in.
    """
    attention = _count_attention(config, arguments.seq_length)
    mlps = [_count_experts(config) if has_experts else _count_dense(config) for has_experts in _list_expert_layers(config)]
    hidden = int(config.hidden_size)
    output = 2 * hidden * arguments.padded_vocab_size
    per_token = len(mlps) * attention + sum(mlps) + output
    # A layer of multi-token prediction is like the decoder's last layer, after a projection of two hidden states to one.
    per_token += int(config.mtp_num_layers or 0) * (attention + mlps[-1] + 4 * hidden * hidden + output)
    return _PASSES * per_token * arguments.seq_length * arguments.global_batch_size


def _count_attention(config: Any, seq_length: int) -> int:
    """Return the forward operations of a token in attention and its projections."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    if config.multi_latent_attention:
        query_rank, rank, rotary = config.q_lora_rank, int(config.kv_lora_rank), int(config.qk_pos_emb_head_dim)
        plain, value = int(config.qk_head_dim), int(config.v_head_dim)
        key = plain + rotary
        query = heads * key * hidden if query_rank is None else int(query_rank) * (hidden + heads * key)
        projections = query + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    else:
        key = value = int(config.kv_channels)
        projections = 2 * hidden * key * (heads + int(config.num_query_groups))
    # The scores and the weighted sum of the values, each over half of the sequence.
    return 2 * projections + heads * (key + value) * seq_length


def _count_dense(config: Any) -> int:
    return _count_mlp(config, int(config.ffn_hidden_size))


def _count_experts(config: Any) -> int:
    router = 2 * int(config.hidden_size) * int(config.num_moe_experts)
    experts = int(config.moe_router_topk) * _count_mlp(config, int(config.moe_ffn_hidden_size))
    return router + experts + _count_mlp(config, int(config.moe_shared_expert_intermediate_size or 0))


def _count_mlp(config: Any, ffn: int) -> int:
    return 2 * (3 if config.gated_linear_unit else 2) * int(config.hidden_size) * ffn


def _list_expert_layers(config: Any) -> list[bool]:
    """Return one flag for each decoder layer: whether it has experts."""
    layers, pattern = int(config.num_layers), config.moe_layer_freq
    if not config.num_moe_experts:
        return [False] * layers
    if isinstance(pattern, int):
        return [number % pattern == 0 for number in range(layers)]
    return [bool(one) for one in pattern]
