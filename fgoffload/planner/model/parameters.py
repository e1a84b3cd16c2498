"""Counts the parameters of a model and of each pipeline rank.

A layer is a list of parameters with their sizes in the whole model and their split: over tensor-parallel ranks, over expert
ranks, or none. Biases and norms count; buffers, like the bias that balances experts, do not.

Source: the modules that megatron-core 0.16.1 builds with Transformer Engine's layers. `tests/unit/megatron/test_parameters.py`
builds models with Megatron's local layers and compares.
"""

import dataclasses
import enum
from collections.abc import Iterator

from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape
from fgoffload.planner.model.parallelism import Parallelism, StageChunk, list_chunks


class Split(enum.Enum):
    """Which ranks share a parameter."""

    NONE = "none"  # each tensor-parallel rank has all of it: norms, the router, parameters after a sum over ranks
    TENSOR = "tensor"  # each tensor-parallel rank has a part
    EXPERT = "expert"  # expert-parallel ranks have some of the experts, and expert-tensor-parallel ranks parts of each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter, or several with the same split."""

    name: str  # name for messages
    count: int  # elements of the parameter, over all ranks
    split: Split = Split.NONE  # which ranks share it
    is_linear: bool = False  # whether this is the weight of a linear layer that computes in fp8 if there is a recipe


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Numbers of parameter elements of one rank."""

    dense_count: int  # elements that all data-parallel ranks replicate
    expert_count: int  # elements of experts, which have fewer copies
    linear_count: int  # elements of both kinds that are weights of linear layers, which have fp8 copies

    @property
    def count(self) -> int:
        """Number of all elements."""
        return self.dense_count + self.expert_count


def count_parameters(model: ModelShape) -> int:
    """Return the parameter count of the whole model, multi-token prediction included."""
    return sum(parameter.count for parameter in _list_model(model))


def count_rank_parameters(model: ModelShape, parallelism: Parallelism, rank: int) -> RankParameters:
    """Return the parameter counts of each rank of a pipeline stage."""
    parameters = [parameter for chunk in list_chunks(model, parallelism)[rank] for parameter in _list_chunk(model, chunk)]
    parts = [(parameter, _count_part(parameter, parallelism)) for parameter in parameters]
    return RankParameters(
        dense_count=sum(count for parameter, count in parts if parameter.split is not Split.EXPERT),
        expert_count=sum(count for parameter, count in parts if parameter.split is Split.EXPERT),
        linear_count=sum(count for parameter, count in parts if parameter.is_linear),
    )


def list_layer_parameters(model: ModelShape, number: int) -> tuple[Parameter, ...]:
    """Return the parameters of layer `number`, including the projection before a layer of multi-token prediction."""
    experts = model.experts if model.has_experts(number) else None
    attention = _list_attention(model) if model.latent is None else _list_latent(model, model.latent)
    return (
        *(_list_projection(model) if model.get_kind(number) == "mtp" else ()),
        Parameter(name="norms of the layer", count=2 * _count_norm(model, model.hidden_size)),
        *attention,
        *(_list_dense_mlp(model) if experts is None else _list_mixture(model, experts)),
    )


def _list_model(model: ModelShape) -> Iterator[Parameter]:
    for number in model.numbers:
        yield from list_layer_parameters(model, number)
    yield from _list_embedding(model)
    yield Parameter(name="last norm", count=_count_norm(model, model.hidden_size))
    if not model.has_tied_embeddings:
        yield _make_word_embedding(model, "output layer")


def _list_chunk(model: ModelShape, chunk: StageChunk) -> Iterator[Parameter]:
    for number in chunk.layers:
        yield from list_layer_parameters(model, number)
    has_prediction = any(number >= model.num_layers for number in chunk.layers)
    if chunk.has_embedding or has_prediction:
        # Multi-token prediction embeds tokens too, with a copy of the first stage's weights.
        yield from _list_embedding(model)
    # With multi-token prediction, the last norm follows the decoder's last layer, in any stage.
    if model.num_layers - 1 in chunk.layers if model.mtp_num_layers else chunk.has_output:
        yield Parameter(name="last norm", count=_count_norm(model, model.hidden_size))
    if chunk.has_output and not (model.has_tied_embeddings and chunk.has_embedding):
        # Tied weights exist once if both are in one chunk. Otherwise each has a copy, even next to multi-token prediction's.
        yield _make_word_embedding(model, "output layer")


def _count_part(parameter: Parameter, parallelism: Parallelism) -> int:
    """Return how many elements of a parameter one rank has."""
    parts = {
        Split.NONE: 1,
        Split.TENSOR: parallelism.tensor_parallel_size,
        Split.EXPERT: parallelism.expert_parallel_size * parallelism.expert_tensor_parallel_size,
    }[parameter.split]
    return parameter.count // parts


def _list_embedding(model: ModelShape) -> Iterator[Parameter]:
    yield _make_word_embedding(model, "embedding")
    if model.learned_positions:
        yield Parameter(name="position embedding", count=model.learned_positions * model.hidden_size)


def _make_word_embedding(model: ModelShape, name: str) -> Parameter:
    return Parameter(name=name, count=model.vocab_size * model.hidden_size, split=Split.TENSOR)


def _list_projection(model: ModelShape) -> Iterator[Parameter]:
    """Yield the parameters of multi-token prediction beside its transformer layer."""
    # Norms of the next tokens' embeddings, of the hidden states, and of the layer's output.
    yield Parameter(name="norms of multi-token prediction", count=3 * _count_norm(model, model.hidden_size))
    count = 2 * model.hidden_size * model.hidden_size
    yield Parameter(name="projection of multi-token prediction", count=count, split=Split.TENSOR, is_linear=True)


def _list_attention(model: ModelShape) -> Iterator[Parameter]:
    heads, channels = model.num_attention_heads, model.kv_channels
    width = (heads + 2 * model.num_query_groups) * channels
    yield _make_linear("query, key and value", model.hidden_size * width)
    if model.has_linear_bias or model.has_qkv_bias:
        yield Parameter(name="biases of query, key and value", count=width, split=Split.TENSOR)
    if model.has_qk_norm:
        yield Parameter(name="norms of query and key", count=2 * _count_norm(model, channels))
    if model.has_attention_sinks:
        yield Parameter(name="attention sinks", count=heads, split=Split.TENSOR)
    yield from _list_attention_output(model, heads * channels)


def _list_latent(model: ModelShape, latent: LatentAttention) -> Iterator[Parameter]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if latent.q_lora_rank is None:
        yield _make_linear("query", hidden * heads * model.qk_channels)
    else:
        yield _make_linear("query, down", hidden * latent.q_lora_rank, Split.NONE)
        yield _make_linear("query, up", latent.q_lora_rank * heads * model.qk_channels)
    yield _make_linear("key-value, down", hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim), Split.NONE)
    yield _make_linear("key-value, up", latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim))
    if model.has_qk_norm:
        # Norms of the up projections' inputs. Without a compressed query, the query's input is the hidden states.
        channels = latent.kv_lora_rank + (latent.q_lora_rank or hidden)
        yield Parameter(name="norms of query and key-value", count=_count_norm(model, channels))
    yield from _list_attention_output(model, heads * latent.v_head_dim)


def _list_attention_output(model: ModelShape, channels: int) -> Iterator[Parameter]:
    yield _make_linear("attention output", channels * model.hidden_size)
    if model.has_linear_bias:
        yield Parameter(name="bias of the attention output", count=model.hidden_size)


def _list_dense_mlp(model: ModelShape) -> Iterator[Parameter]:
    width = _count_gates(model) * model.ffn_hidden_size
    yield _make_linear("MLP", model.hidden_size * (width + model.ffn_hidden_size))
    if model.has_linear_bias:
        yield Parameter(name="bias of the first linear", count=width, split=Split.TENSOR)
        yield Parameter(name="bias of the second linear", count=model.hidden_size)


def _list_mixture(model: ModelShape, experts: ExpertsShape) -> Iterator[Parameter]:
    hidden, channels = model.hidden_size, experts.ffn_hidden_size
    width = _count_gates(model) * channels
    biases = experts.num_experts if model.has_linear_bias else 0
    yield Parameter(name="router", count=hidden * experts.num_experts + biases)
    yield _make_expert(experts, "experts", hidden * (width + channels), is_linear=True)
    if model.has_linear_bias:
        # Megatron has these biases only if each expert is whole on a rank.
        yield _make_expert(experts, "biases of the experts", width + hidden)
    if experts.shared_ffn_hidden_size:
        # Megatron refuses biases in shared experts.
        yield _make_linear("shared experts", hidden * (_count_gates(model) + 1) * experts.shared_ffn_hidden_size)


def _make_linear(name: str, count: int, split: Split = Split.TENSOR) -> Parameter:
    return Parameter(name=name, count=count, split=split, is_linear=True)


def _make_expert(experts: ExpertsShape, name: str, each: int, *, is_linear: bool = False) -> Parameter:
    return Parameter(name=name, count=experts.num_experts * each, split=Split.EXPERT, is_linear=is_linear)


def _count_gates(model: ModelShape) -> int:
    return 2 if model.is_gated else 1


def _count_norm(model: ModelShape, channels: int) -> int:
    # RMSNorm has weights; LayerNorm has biases too.
    return channels * (2 if model.normalization == "LayerNorm" else 1)
