"""Counts the parameters of each pipeline rank.

Each layer is a list of parameters with their unsharded sizes and how they are sharded: over tensor-parallel ranks, over expert
ranks, or not at all. Biases and norms are counted. Buffers, such as the bias that balances experts, are not.

Source: the modules that megatron-core 0.16.1 builds with Transformer Engine's layers. `tests/unit/megatron/test_parameters.py`
builds models with Megatron's local layers and compares the counts.
"""

import dataclasses
import enum
from collections.abc import Iterator

from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape
from fgoffload.planner.model.parallelism import Parallelism, StageChunk, list_chunks


class Split(enum.Enum):
    """How a parameter is sharded over ranks."""

    NONE = "none"  # each tensor-parallel rank has a copy: norms, the router, biases added after a reduction
    TENSOR = "tensor"  # each tensor-parallel rank has a part
    EXPERT = "expert"  # expert-parallel ranks have different experts; expert-tensor-parallel ranks have parts of each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter, or several that are sharded in the same way."""

    count: int  # elements in the whole model
    split: Split = Split.NONE
    is_linear: bool = False  # whether it is the weight of a linear layer, which an fp8 recipe quantizes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Parameter counts of one rank, in elements."""

    dense_count: int  # elements outside experts, with a copy on each data-parallel rank
    expert_count: int  # elements of experts, which have fewer copies
    linear_count: int  # dense and expert elements that are weights of linear layers, which have fp8 copies

    @property
    def count(self) -> int:
        """Total number of elements."""
        return self.dense_count + self.expert_count


def count_rank_parameters(model: ModelShape, parallelism: Parallelism, rank: int) -> RankParameters:
    """Return the parameter counts of one rank of pipeline stage `rank`."""
    parameters = [parameter for chunk in list_chunks(model, parallelism)[rank] for parameter in _list_chunk(model, chunk)]
    parts = [(parameter, _count_part(parameter, parallelism)) for parameter in parameters]
    return RankParameters(
        dense_count=sum(count for parameter, count in parts if parameter.split is not Split.EXPERT),
        expert_count=sum(count for parameter, count in parts if parameter.split is Split.EXPERT),
        linear_count=sum(count for parameter, count in parts if parameter.is_linear),
    )


def _list_layer(model: ModelShape, number: int) -> Iterator[Parameter]:
    experts = model.experts if model.has_experts(number) else None
    if model.get_kind(number) == "mtp":
        yield from _list_mtp_projection(model)
    yield Parameter(count=2 * _count_norm(model, model.hidden_size))
    yield from _list_attention(model) if model.latent is None else _list_latent(model, model.latent)
    yield from _list_dense_mlp(model) if experts is None else _list_mixture(model, experts)


def _list_chunk(model: ModelShape, chunk: StageChunk) -> Iterator[Parameter]:
    for number in chunk.layers:
        yield from _list_layer(model, number)
    has_prediction = any(number >= model.num_layers for number in chunk.layers)
    if chunk.has_embedding or has_prediction:
        # Multi-token prediction also embeds tokens, with a copy of the first stage's weights.
        yield from _list_embedding(model)
    # With multi-token prediction, the final norm follows the decoder's last layer, in whichever stage that is.
    if model.num_layers - 1 in chunk.layers if model.mtp_num_layers else chunk.has_output:
        yield Parameter(count=_count_norm(model, model.hidden_size))
    if chunk.has_output and not (model.has_tied_embeddings and chunk.has_embedding):
        # Tied weights exist once if one chunk has both embedding and output layer; otherwise the output layer has a copy.
        yield _make_word_embedding(model)


def _count_part(parameter: Parameter, parallelism: Parallelism) -> int:
    parts = {
        Split.NONE: 1,
        Split.TENSOR: parallelism.tensor_parallel_size,
        Split.EXPERT: parallelism.expert_parallel_size * parallelism.expert_tensor_parallel_size,
    }[parameter.split]
    return parameter.count // parts


def _list_embedding(model: ModelShape) -> Iterator[Parameter]:
    yield _make_word_embedding(model)
    if model.learned_positions:
        yield Parameter(count=model.learned_positions * model.hidden_size)


def _make_word_embedding(model: ModelShape) -> Parameter:
    return Parameter(count=model.vocab_size * model.hidden_size, split=Split.TENSOR)


def _list_mtp_projection(model: ModelShape) -> Iterator[Parameter]:
    # Norms of the next tokens' embeddings, of the hidden states, and of the layer's output.
    yield Parameter(count=3 * _count_norm(model, model.hidden_size))
    yield _make_linear(2 * model.hidden_size * model.hidden_size)


def _list_attention(model: ModelShape) -> Iterator[Parameter]:
    heads, channels = model.num_attention_heads, model.kv_channels
    width = (heads + 2 * model.num_query_groups) * channels
    yield _make_linear(model.hidden_size * width)
    if model.has_linear_bias or model.has_qkv_bias:
        yield Parameter(count=width, split=Split.TENSOR)
    if model.has_qk_norm:
        yield Parameter(count=2 * _count_norm(model, channels))
    if model.has_attention_sinks:
        yield Parameter(count=heads, split=Split.TENSOR)
    yield from _list_attention_output(model, heads * channels)


def _list_latent(model: ModelShape, latent: LatentAttention) -> Iterator[Parameter]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if latent.q_lora_rank is None:
        yield _make_linear(hidden * heads * model.qk_channels)
    else:
        yield _make_linear(hidden * latent.q_lora_rank, Split.NONE)
        yield _make_linear(latent.q_lora_rank * heads * model.qk_channels)
    yield _make_linear(hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim), Split.NONE)
    yield _make_linear(latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim))
    if model.has_qk_norm:
        # Norms of the up-projections' inputs. Without compression, the query projection reads the hidden states.
        channels = latent.kv_lora_rank + (latent.q_lora_rank or hidden)
        yield Parameter(count=_count_norm(model, channels))
    yield from _list_attention_output(model, heads * latent.v_head_dim)


def _list_attention_output(model: ModelShape, channels: int) -> Iterator[Parameter]:
    yield _make_linear(channels * model.hidden_size)
    if model.has_linear_bias:
        yield Parameter(count=model.hidden_size)


def _list_dense_mlp(model: ModelShape) -> Iterator[Parameter]:
    width = _count_gates(model) * model.ffn_hidden_size
    yield _make_linear(model.hidden_size * (width + model.ffn_hidden_size))
    if model.has_linear_bias:
        yield Parameter(count=width, split=Split.TENSOR)  # of the first linear
        yield Parameter(count=model.hidden_size)  # of the second linear


def _list_mixture(model: ModelShape, experts: ExpertsShape) -> Iterator[Parameter]:
    hidden, channels = model.hidden_size, experts.ffn_hidden_size
    width = _count_gates(model) * channels
    biases = experts.num_experts if model.has_linear_bias else 0
    yield Parameter(count=hidden * experts.num_experts + biases)
    yield Parameter(count=experts.num_experts * hidden * (width + channels), split=Split.EXPERT, is_linear=True)
    if model.has_linear_bias:
        # Megatron supports these biases only if each rank has whole experts.
        yield Parameter(count=experts.num_experts * (width + hidden), split=Split.EXPERT)
    if experts.shared_ffn_hidden_size:
        # Megatron does not support biases in shared experts.
        yield _make_linear(hidden * (_count_gates(model) + 1) * experts.shared_ffn_hidden_size)


def _make_linear(count: int, split: Split = Split.TENSOR) -> Parameter:
    return Parameter(count=count, split=split, is_linear=True)


def _count_gates(model: ModelShape) -> int:
    return 2 if model.is_gated else 1


def _count_norm(model: ModelShape, channels: int) -> int:
    # RMSNorm has weights; LayerNorm has biases too.
    return channels * (2 if model.normalization == "LayerNorm" else 1)
