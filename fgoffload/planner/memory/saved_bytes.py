"""Bytes that each tag saves for backward, in one layer and microbatch on one rank.

They hold for Transformer Engine's layers, its fused attention and activations in bf16. A sliding window changes nothing. Biases
of linears do not either: tensors saved for the experts' biases have no tag. Letters as in docs/reference/saved_bytes.md: s
sequence, b microbatch, h hidden, n heads, g query groups, t tensor parallel size, k experts of a token, f channels of an MLP, E
experts, e expert tensor parallel size. `shape.tokens` is sb/t. Without sequence parallelism, it and rows of h channels are sb.

Tags are not additive: two may save the same storage, which is offloaded once. So a layer is a list of tensors, each with the
tags that save it, and bytes of several tags are summed over these tensors:

    count_bytes(shape, ("core_attn", "attn_proj")) == count_bytes(shape, ("core_attn",))

`untagged_bytes.list_untagged_tensors` has the tensors that no tag saves. They stay on the GPU under any plan.

Source: measured, to the byte, with Transformer Engine 2.20.2, megatron-core 0.16.1 and torch 2.11 on H200, at t = 1 and 2;
`tests/gpu/test_megatron_bytes.py` compares. docs/reference/saved_bytes.md lists numbers from the code of both, not measured.
"""

from collections.abc import Iterable, Iterator

from fgoffload.planner.memory.fp8_inputs import count_input_bytes, get_input_element_bytes, pad_rows
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape
from fgoffload.planner.ranks.layer_model import SavedTensor
from fgoffload.tags import default_tags

_BF16 = 2
_FP32 = 4
_INT32 = 4
_INT64 = 8
"""Bytes of an element."""

_RANDOM_STATE_BYTES = 2 * _INT64
"""Seed and offset of the attention's dropout, which are saved without dropout too. Source: measured."""


def list_saved_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of a layer, in forward order.

    The tag `layer_input` is for a layer that is recomputed as a whole. It then saves the tensors listed here, and no other tag
    saves anything. `untagged_bytes.list_untagged_tensors` has the tensors that no tag ever saves.
    """
    mlp = _list_dense_mlp(shape) if shape.experts is None else _list_mixture(shape, shape.experts)
    return (*_list_layer_input(shape), *_list_projections(shape), *_list_core_attention(shape), *mlp)


def count_tag_bytes(shape: LayerShape) -> dict[str, int]:
    """Return the bytes that each tag of the layer saves, each counted alone, in forward order.

    Returns:
        Bytes by tag, for tags that save anything in such a layer. They equal a step's `d2h_bytes` plus `shared_bytes` of the
        tag, divided by its number of groups.
    """
    tensors = list_saved_tensors(shape)
    found = {tag for tensor in tensors for tag in tensor.tags}
    return {tag: count_bytes(shape, (tag,)) for tag in default_tags().names if tag in found}


def count_bytes(shape: LayerShape, tags: Iterable[str]) -> int:
    """Return the bytes that `tags` save together. Tensors that several of them save count once.

    Raises:
        ConfigError: A tag is not known.
    """
    names = {default_tags().get(tag).name for tag in tags}
    return sum(tensor.size_bytes for tensor in list_saved_tensors(shape) if names.intersection(tensor.tags))


def count_norm_statistics(shape: LayerShape) -> int:
    """Return the bytes of a norm's statistics, 4sb/t: inverse deviation of each token, in fp32; LayerNorm saves means too."""
    return _count_statistics(shape, shape.tokens)


def _count_statistics(shape: LayerShape, rows: int) -> int:
    return (2 if shape.normalization == "LayerNorm" else 1) * _FP32 * rows


def count_expert_rows(shape: LayerShape, experts: ExpertsShape) -> tuple[int, int]:
    """Return the rows of all experts of a rank, and of each expert. In fp8 the rows of each are padded."""
    rows = experts.count_rows(shape.tokens)
    each = pad_rows(shape.fp8_recipe, -(-rows // experts.local_experts))
    return (rows if shape.fp8_recipe is None else each * experts.local_experts), each


def _list_layer_input(shape: LayerShape) -> Iterator[SavedTensor]:
    # The norm before attention saves the layer input, 2sbh/t. If the norm is fused, it is a part of the linear.
    norm = "qkv_linear" if _has_fused_attention_norm(shape) else "attn_norm"
    yield SavedTensor(name="layer input", tags=("layer_input", norm), size_bytes=_BF16 * shape.tokens * shape.hidden_size)
    if shape.rotary_channels and shape.latent is None:
        # Each layer gets the whole tensor, [s, 1, 1, rotary_channels] in fp32, so a checkpoint of the layer saves it.
        size_bytes = _FP32 * shape.seq_length * shape.rotary_channels
        yield SavedTensor(
            name="rotary embedding",
            tags=("layer_input",),
            size_bytes=size_bytes,
            is_same_in_all_layers=True,
            element_bytes=_FP32,
        )


def _list_projections(shape: LayerShape) -> Iterator[SavedTensor]:
    """Yield the saved tensors of the norm before attention and of the projections to query, key and value."""
    norm = "qkv_linear" if _has_fused_attention_norm(shape) else "attn_norm"
    yield SavedTensor(
        name="statistics of the norm before attention",
        tags=(norm,),
        size_bytes=count_norm_statistics(shape),
        element_bytes=_FP32,
    )
    # The norm's output, 2sbh/t. All linears after the norm save it once, or in fp8 one copy each. A norm fused into the
    # query's linear saves it in bf16.
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=shape.hidden_size)
    if shape.latent is not None and shape.fp8_recipe is not None:
        size_bytes += _BF16 * shape.tokens * shape.hidden_size if shape.latent.has_whole_query_norm else size_bytes
    yield SavedTensor(
        name="output of the norm before attention",
        tags=("qkv_linear",),
        size_bytes=size_bytes,
        element_bytes=get_input_element_bytes(shape.fp8_recipe),
    )
    if shape.latent is not None:
        yield from _list_latent(shape, shape.latent)
    elif shape.has_qk_norm:
        yield from _list_head_norms(shape)


def _list_head_norms(shape: LayerShape) -> Iterator[SavedTensor]:
    for name, heads in (("query", shape.num_attention_heads), ("key", shape.num_query_groups)):
        # 2sbn dqk/t and 2sbg dqk/t: inputs of the norms, which are copies of parts of the linear's output.
        size_bytes = _BF16 * shape.shared_tokens * heads * shape.qk_channels
        yield SavedTensor(name=f"{name} before its norm", tags=("qkv_linear",), size_bytes=size_bytes)
        # Statistics of each head: 4sbn/t and 4sbg/t.
        size_bytes = _count_statistics(shape, heads * shape.shared_tokens)
        yield SavedTensor(
            name=f"statistics of the {name}'s norm", tags=("qkv_linear",), size_bytes=size_bytes, element_bytes=_FP32
        )


def _list_latent(shape: LayerShape, latent: LatentShape) -> Iterator[SavedTensor]:
    tags, recipe = ("qkv_linear",), None if latent.has_qk_norm else shape.fp8_recipe
    for name, rank in (("query", latent.q_lora_rank), ("key-value", latent.kv_lora_rank)):
        if rank is not None:
            # 2sb rank/t: input of the up-projection, or of the norm that is fused into it.
            size_bytes, element_bytes = (
                count_input_bytes(recipe, rows=shape.tokens, channels=rank),
                get_input_element_bytes(recipe),
            )
            yield SavedTensor(name=f"compressed {name}", tags=tags, size_bytes=size_bytes, element_bytes=element_bytes)
        if latent.has_qk_norm:
            # Output of the fused norm, which is the linear's input, and statistics of the norm.
            size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=rank or shape.hidden_size)
            size_bytes, element_bytes = size_bytes + count_norm_statistics(shape), get_input_element_bytes(shape.fp8_recipe)
            yield SavedTensor(name=f"normed input of the {name}", tags=tags, size_bytes=size_bytes, element_bytes=element_bytes)
    # Cosine and sine, [s, 1, 1, qk_pos_emb_head_dim] in bf16, once for the query and once for the key. Heads share them, and
    # attention has the whole sequence, so no size is divided by t.
    size_bytes = 4 * _BF16 * shape.seq_length * latent.qk_pos_emb_head_dim
    yield SavedTensor(name="rotary tables", tags=("qkv_linear",), size_bytes=size_bytes)


def _list_core_attention(shape: LayerShape) -> Iterator[SavedTensor]:
    tags = ("core_attn",)
    query = shape.num_attention_heads * shape.qk_channels
    key_value = shape.num_query_groups * (shape.qk_channels + shape.v_channels)
    # 2sb(n dqk + g dqk + g dv)/t: each rank has the whole sequence and 1/t of the heads.
    yield SavedTensor(name="query, key and value", tags=tags, size_bytes=_BF16 * shape.shared_tokens * (query + key_value))
    # 2sbn dv/t: the projection after attention saves it as its input. In fp8 it does too, except under delayed scaling.
    size_bytes = _BF16 * shape.shared_tokens * shape.num_attention_heads * shape.v_channels
    is_shared = shape.fp8_recipe != "delayed"
    yield SavedTensor(name="attention output", tags=("core_attn", "attn_proj") if is_shared else tags, size_bytes=size_bytes)
    if not is_shared:
        size_bytes = _count_row_parallel_input(shape, shape.num_attention_heads * shape.v_channels)
        yield SavedTensor(
            name="attention output in fp8",
            tags=("attn_proj",),
            size_bytes=size_bytes,
            element_bytes=get_input_element_bytes(shape.fp8_recipe),
        )
    # 4sbn/t: log-sum-exp of each row, [b, n / t, s, 1] in fp32.
    size_bytes = _FP32 * shape.shared_tokens * shape.num_attention_heads
    yield SavedTensor(name="log-sum-exp", tags=tags, size_bytes=size_bytes, element_bytes=_FP32)
    yield SavedTensor(name="random state", tags=tags, size_bytes=_RANDOM_STATE_BYTES, element_bytes=_INT64)
    if shape.has_attention_sinks:
        # 4n/t: a bf16 parameter. Attention gets and saves it in fp32, [1, n / t, 1, 1].
        size_bytes = _FP32 * shape.num_attention_heads // shape.tensor_parallel_size
        yield SavedTensor(name="attention sinks", tags=tags, size_bytes=size_bytes, element_bytes=_FP32)
    # Start of each sequence and end of the last one, [b + 1]: the same tensor for query and key, and for all layers.
    size_bytes = _INT32 * (shape.micro_batch_size + 1)
    yield SavedTensor(
        name="sequence lengths", tags=tags, size_bytes=size_bytes, is_same_in_all_layers=True, element_bytes=_INT32
    )


def _list_dense_mlp(shape: LayerShape) -> Iterator[SavedTensor]:
    norm = "mlp_fc1" if shape.has_fused_norms else "mlp_norm"
    yield from _list_mlp_norm(shape, norm)
    # The norm's output 2sbh/t.
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=shape.hidden_size)
    yield SavedTensor(
        name="output of the norm before the MLP",
        tags=("mlp_fc1",),
        size_bytes=size_bytes,
        element_bytes=get_input_element_bytes(shape.fp8_recipe),
    )
    rows, channels = shape.shared_tokens * shape.tensor_parallel_size, shape.ffn_hidden_size // shape.tensor_parallel_size
    # 4sbf/t: gate and up, [s, b, 2f / t]; 2sbf/t without a gate.
    size_bytes = _count_activation_input(shape, rows, channels)
    yield SavedTensor(name="first linear's output", tags=("mlp_act",), size_bytes=size_bytes)
    for name in _list_factors(shape):
        # 2sbf/t.
        yield SavedTensor(name=name, tags=("mlp_act",), size_bytes=_BF16 * rows * channels)
    # 2sbf/t.
    size_bytes = _count_row_parallel_input(shape, shape.ffn_hidden_size)
    yield SavedTensor(
        name="activation's output",
        tags=("mlp_fc2",),
        size_bytes=size_bytes,
        element_bytes=get_input_element_bytes(shape.fp8_recipe),
    )


def _list_mlp_norm(shape: LayerShape, tag: str) -> Iterator[SavedTensor]:
    # The residual after attention 2sbh/t.
    yield SavedTensor(name="residual", tags=(tag,), size_bytes=_BF16 * shape.tokens * shape.hidden_size)
    yield SavedTensor(
        name="statistics of the norm before the MLP", tags=(tag,), size_bytes=count_norm_statistics(shape), element_bytes=_FP32
    )


def _list_mixture(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    yield from _list_mlp_norm(shape, "mlp_norm")
    size_bytes = _BF16 * shape.tokens * shape.hidden_size
    shares = experts.shared_ffn_hidden_size and not _has_own_input(shape, experts)
    # The norm's output, 2sbh/t. The router saves it; so do shared experts that neither gather nor quantize their input.
    tags = ("shared_expert", "router") if shares else ("router",)
    yield SavedTensor(name="output of the norm before the MLP", tags=tags, size_bytes=size_bytes)
    if experts.shared_ffn_hidden_size:
        yield from _list_shared_experts(shape, experts)
    yield from _list_router(shape, experts, experts.router)
    yield from _list_experts(shape, experts)
    yield from _list_combine(shape, experts)


def _has_own_input(shape: LayerShape, experts: ExpertsShape) -> bool:
    """Return whether the shared experts save a separate input instead of sharing the router's."""
    return _gathers(shape, experts) or shape.fp8_recipe == "delayed"


def _gathers(shape: LayerShape, experts: ExpertsShape) -> bool:
    # Under overlap, the shared experts run the collectives of tensor parallelism themselves.
    return experts.has_shared_overlap and shape.tensor_parallel_size > 1


def _list_shared_experts(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    tags = ("shared_expert",)
    if _has_own_input(shape, experts):
        # 2sbh if they gather, because they save the whole sequence. In fp8 they save their input unquantized, as the router
        # does, except under delayed scaling, which cannot.
        name, rows = "input of the shared experts in fp8", shape.tokens
        if _gathers(shape, experts):
            name, rows = "gathered input of the shared experts", shape.tokens * shape.tensor_parallel_size
        recipe = shape.fp8_recipe if shape.fp8_recipe == "delayed" else None
        size_bytes = count_input_bytes(recipe, rows=rows, channels=shape.hidden_size)
        yield SavedTensor(name=name, tags=tags, size_bytes=size_bytes)
    rows, channels = (
        shape.shared_tokens * shape.tensor_parallel_size,
        experts.shared_ffn_hidden_size // shape.tensor_parallel_size,
    )
    # 4sbf/t of gate and up; 2sbf/t for each factor of an unfused activation; 2sbf/t of the activation's output.
    size_bytes = _count_activation_input(shape, rows, channels) + len(_list_factors(shape)) * _BF16 * rows * channels
    size_bytes += _count_row_parallel_input(shape, experts.shared_ffn_hidden_size)
    yield SavedTensor(name="inside of the shared experts", tags=tags, size_bytes=size_bytes)


def _list_router(shape: LayerShape, experts: ExpertsShape, router: RouterShape) -> Iterator[SavedTensor]:
    tags, tokens, chosen = ("router",), shape.tokens, shape.tokens * experts.topk
    # 8sbk/t: indices of the chosen experts in int64, saved by the ops that choose them and scatter their probabilities.
    yield SavedTensor(name="chosen experts", tags=tags, size_bytes=_INT64 * chosen, element_bytes=_INT64)
    if shape.is_deterministic:
        # 8sb/t: index_put then scatters the probabilities. Its row numbers are [sb / t, 1] in int64.
        yield SavedTensor(name="row numbers", tags=tags, size_bytes=_INT64 * tokens, element_bytes=_INT64)
    yield SavedTensor(name="scores", tags=tags, size_bytes=_count_score_bytes(tokens, experts, router), element_bytes=_FP32)
    if router.balancing != "none":
        size_bytes = _count_balancing_bytes(shape, experts, router)
        yield SavedTensor(name="balancing loss", tags=tags, size_bytes=size_bytes, element_bytes=_FP32)


def _count_score_bytes(tokens: int, experts: ExpertsShape, router: RouterShape) -> int:
    if router.score_function == "softmax":
        # 4sbk/t: softmax saves its output, in fp32 for any router dtype. 4sbE/t if softmax precedes the choice.
        return _FP32 * tokens * (experts.num_experts if router.has_pre_softmax else experts.topk)
    # 4sbE/t: sigmoid saves its output of all experts. The chosen scores and their sum, which divides them, are saved too.
    chosen = experts.topk + 1 if experts.topk > 1 else 0
    return _FP32 * tokens * (experts.num_experts + chosen)


def _count_balancing_bytes(shape: LayerShape, experts: ExpertsShape, router: RouterShape) -> int:
    # Token counts of each expert in int64, per sequence or per microbatch.
    counts = experts.num_experts * (shape.micro_batch_size if router.balancing == "seq_aux_loss" else 1)
    size_bytes = _INT64 * counts
    if router.score_function == "softmax":
        # 4sbE/t: softmax over all experts. The loss is one number.
        return size_bytes + _FP32 * shape.tokens * experts.num_experts + _FP32
    # Sigmoid of all experts, their sum, which divides them, and the loss.
    return size_bytes + _FP32 * (shape.tokens * (experts.num_experts + 1) + 1)


def _list_experts(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the saved tensors of the experts, with sbke/t rows if routing is balanced over ranks."""
    rows, each = count_expert_rows(shape, experts)
    channels = experts.ffn_hidden_size // experts.expert_tensor_parallel_size
    # 2sbkhe/t: each rank that shares an expert has all of its rows.
    size_bytes = _count_expert_input(shape, experts, rows=rows, each=each, channels=shape.hidden_size)
    yield SavedTensor(
        name="permuted tokens",
        tags=("expert_fc1",),
        size_bytes=size_bytes,
        element_bytes=get_input_element_bytes(shape.fp8_recipe),
    )
    # 4sbkf/t: gate and up.
    size_bytes = _count_activation_input(shape, rows, channels)
    yield SavedTensor(name="first linears' output", tags=("moe_act",), size_bytes=size_bytes)
    for name in _list_factors(shape):
        # 2sbkf/t.
        yield SavedTensor(name=name, tags=("moe_act",), size_bytes=_BF16 * rows * channels)
    if not (shape.is_gated and shape.has_fused_activation):
        # 2sbkf/t: a separate op then multiplies with the probabilities, and saves its input. That is in bf16 even if the
        # probabilities are in fp32: autograd saves the original tensor, and copies between types save nothing.
        yield SavedTensor(name="output of the bare activation", tags=("moe_act",), size_bytes=_BF16 * rows * channels)
    # 2sbke/t, or 4sbke/t with a router in fp32: the activation applies the probabilities, [sbke / t, 1].
    yield SavedTensor(
        name="permuted probabilities",
        tags=("moe_act",),
        size_bytes=experts.router.dtype_bytes * rows,
        element_bytes=experts.router.dtype_bytes,
    )
    # 2sbkf/t.
    size_bytes = _count_expert_input(shape, experts, rows=rows, each=each, channels=channels)
    yield SavedTensor(
        name="activation's output",
        tags=("expert_fc2",),
        size_bytes=size_bytes,
        element_bytes=get_input_element_bytes(shape.fp8_recipe),
    )


def _count_expert_input(shape: LayerShape, experts: ExpertsShape, *, rows: int, each: int, channels: int) -> int:
    if shape.fp8_recipe is None:
        return count_input_bytes(None, rows=rows, channels=channels)
    # Each expert has its own scales.
    return experts.local_experts * count_input_bytes(shape.fp8_recipe, rows=each, channels=channels)


def _list_combine(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    tags, permuted = ("moe_combine",), shape.tokens * experts.topk
    if experts.has_fused_permutation:
        if experts.local_experts > 1:
            # 4sbke/t: order of the tokens if a rank has several experts, in int32.
            size_bytes = _INT32 * experts.count_rows(shape.tokens)
            yield SavedTensor(name="order by expert", tags=tags, size_bytes=size_bytes, element_bytes=_INT32)
        # 4sb(2E + 1)/t: destinations of each token, its experts, and their number, in int32.
        size_bytes = _INT32 * shape.tokens * (2 * experts.num_experts + 1)
        yield SavedTensor(name="row map", tags=tags, size_bytes=size_bytes, element_bytes=_INT32)
        return
    # 8sbk/t: index of each permuted token, in int64. Its expansion over channels is a view of the same storage.
    yield SavedTensor(name="places of the permuted tokens", tags=tags, size_bytes=_INT64 * permuted, element_bytes=_INT64)
    if shape.is_deterministic:
        # 2sbkh/t: index_add is used then, and saves its source.
        yield SavedTensor(name="experts' output", tags=tags, size_bytes=_BF16 * permuted * shape.hidden_size)


def _has_fused_attention_norm(shape: LayerShape) -> bool:
    # Latent attention has two linears after the norm, so the norm is a separate module.
    return shape.has_fused_norms and shape.latent is None


def _count_activation_input(shape: LayerShape, rows: int, channels: int) -> int:
    """Return the bytes that an activation saves of the first linear's output: `[rows, 2 channels]`, or half without a gate.

    An unfused activation saves only the gate. The gate is a view of more than half of the bytes from its first row to its last,
    so this whole range is kept or offloaded: everything except the up-projection of the last row, 2f/t.
    """
    if not shape.is_gated:
        return _BF16 * rows * channels
    return _BF16 * (2 * rows - (0 if shape.has_fused_activation else 1)) * channels


def _list_factors(shape: LayerShape) -> tuple[str, ...]:
    """Return the tensors that an unfused gated activation saves for its product, each `[rows, channels]`.

    The up-projection is a separate tensor there, because Megatron adds `glu_linear_offset` to it, which is 0.

    Source: `MLP.forward` of megatron/core/transformer/mlp.py and `TEGroupedMLP.forward` of transformer/moe/experts.py,
    megatron-core 0.16.1. `tests/unit/megatron/test_saved_bytes.py` runs both on the CPU.
    """
    return ("activated gate", "up-projection with its offset") if shape.is_gated and not shape.has_fused_activation else ()


def _count_row_parallel_input(shape: LayerShape, channels: int) -> int:
    """Return the bytes that a row-parallel linear saves of its input: 2sb channels/t in bf16."""
    rows = shape.shared_tokens * shape.tensor_parallel_size
    return count_input_bytes(shape.fp8_recipe, rows=rows, channels=channels // shape.tensor_parallel_size)
