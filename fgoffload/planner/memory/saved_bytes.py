"""Counts the bytes that each tag saves for backward, for one layer and microbatch on one rank.

The formulas hold for Transformer Engine's layers with fused attention and bf16 activations. Sliding windows and linear biases
do not change them; tensors saved for expert biases have no tag. Symbols are as in docs/reference/saved_bytes.md: s sequence
length, b microbatch size, h hidden size, n heads, g query groups, t tensor parallel size, k experts per token, f channels of an
MLP, E experts, e expert tensor parallel size. `shape.tokens` is sb/t, or sb without sequence parallelism.

Two tags may save the same storage, which is offloaded once, so their bytes cannot be added. A layer is therefore a list of
tensors, each with the tags that save it, and `count_bytes` counts every tensor once:

    count_bytes(shape, ("core_attn", "attn_proj")) == count_bytes(shape, ("core_attn",))

`list_untagged_tensors` returns the tensors that no tag saves. They stay on the GPU under any plan.

Source: measured with Transformer Engine 2.20.2, megatron-core 0.16.1 and torch 2.11 on H200, at t = 1 and 2;
`tests/gpu/test_megatron_bytes.py` requires exact matches. docs/reference/saved_bytes.md lists unmeasured formulas.
"""

from collections.abc import Iterable, Iterator

from fgoffload.planner.memory.fp8_saved_bytes import count_input_bytes, get_input_element_bytes, pad_rows
from fgoffload.planner.model.layer_shape import ExpertsShape, Fp8Recipe, LatentShape, LayerShape, RouterShape
from fgoffload.planner.operations.layer_sizes import LayerSizes
from fgoffload.planner.operations.ops import BF16, FP32, INT32, INT64
from fgoffload.planner.ranks.layer_model import SavedTensor
from fgoffload.tags import default_tags

_RANDOM_STATE_BYTES = 2 * INT64
"""Seed and offset of attention dropout, saved even without dropout. Source: measured."""

_CORE, _ROUTER, _SHARED = ("core_attn",), ("router",), ("shared_expert",)


def list_saved_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of a layer, in forward order. In a fully recomputed layer, only `layer_input` saves any."""
    mlp = _list_dense_mlp(shape) if shape.experts is None else _list_mixture(shape, shape.experts)
    return (*_list_layer_input(shape), *_list_projections(shape), *_list_core_attention(shape), *mlp)


def count_tag_bytes(shape: LayerShape) -> dict[str, int]:
    """Return the bytes that each tag of the layer saves on its own, in forward order."""
    found = {tag for tensor in list_saved_tensors(shape) for tag in tensor.tags}
    return {tag: count_bytes(shape, (tag,)) for tag in default_tags().names if tag in found}


def count_bytes(shape: LayerShape, tags: Iterable[str]) -> int:
    """Return the bytes that `tags` save together. A tensor that several of them save counts once."""
    names = {default_tags().get(tag).name for tag in tags}
    return sum(tensor.size_bytes for tensor in list_saved_tensors(shape) if names.intersection(tensor.tags))


def count_norm_statistics(shape: LayerShape, rows: int | None = None) -> int:
    """Return the bytes of a norm's statistics per token in fp32: inverse standard deviation, 4sb/t, and LayerNorm's mean."""
    return (2 if shape.normalization == "LayerNorm" else 1) * FP32 * (shape.tokens if rows is None else rows)


def count_expert_rows(shape: LayerShape, experts: ExpertsShape) -> tuple[int, int]:
    """Return the rows of all experts of a rank, and the rows per expert. With fp8, each expert's rows are padded."""
    rows = experts.count_rows(shape.tokens)
    each = pad_rows(shape.fp8_recipe, -(-rows // experts.local_experts))
    return (rows if shape.fp8_recipe is None else each * experts.local_experts), each


def _make(
    name: str, tags: tuple[str, ...], size_bytes: int, element_bytes: int = BF16, *, is_same_in_all_layers: bool = False
) -> SavedTensor:
    return SavedTensor(
        name=name, tags=tags, size_bytes=size_bytes, is_same_in_all_layers=is_same_in_all_layers, element_bytes=element_bytes
    )


def _make_input(name: str, tag: str, recipe: Fp8Recipe | None, size_bytes: int) -> SavedTensor:
    return _make(name, (tag,), size_bytes, get_input_element_bytes(recipe))


def _list_layer_input(shape: LayerShape) -> Iterator[SavedTensor]:
    # The norm before attention saves the layer input, 2sbh/t. If the norm is fused, the linear saves it.
    norm = "qkv_linear" if shape.has_fused_attention_norm else "attn_norm"
    yield _make("layer input", ("layer_input", norm), LayerSizes(shape).hidden)
    if shape.rotary_channels and shape.latent is None:
        # Each layer gets the whole tensor, [s, 1, 1, rotary_channels] in fp32, so a checkpoint of the layer saves it.
        size_bytes = FP32 * shape.seq_length * shape.rotary_channels
        yield _make("rotary embedding", ("layer_input",), size_bytes, FP32, is_same_in_all_layers=True)


def _list_projections(shape: LayerShape) -> Iterator[SavedTensor]:
    norm, hidden = "qkv_linear" if shape.has_fused_attention_norm else "attn_norm", LayerSizes(shape).hidden
    yield _make("statistics of the norm before attention", (norm,), count_norm_statistics(shape), FP32)
    # The norm's output, 2sbh/t. With bf16, all linears after the norm save the same storage. With fp8, each saves its own copy.
    # A norm fused into the query's linear saves it in bf16.
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=shape.hidden_size)
    if shape.latent is not None and shape.fp8_recipe is not None:
        size_bytes += hidden if shape.latent.has_whole_query_norm else size_bytes
    yield _make_input("output of the norm before attention", "qkv_linear", shape.fp8_recipe, size_bytes)
    if shape.latent is not None:
        yield from _list_latent(shape, shape.latent)
    elif shape.has_qk_norm:
        yield from _list_head_norms(shape)


def _list_head_norms(shape: LayerShape) -> Iterator[SavedTensor]:
    for name, heads in (("query", shape.num_attention_heads), ("key", shape.num_query_groups)):
        rows = heads * shape.shared_tokens
        # 2sbn dqk/t and 2sbg dqk/t: inputs of the norms, copied from parts of the linear's output.
        yield _make(f"{name} before its norm", ("qkv_linear",), BF16 * rows * shape.qk_channels)
        # 4sbn/t and 4sbg/t: the norm saves one fp32 statistic per token and head.
        yield _make(f"statistics of the {name}'s norm", ("qkv_linear",), count_norm_statistics(shape, rows), FP32)


def _list_latent(shape: LayerShape, latent: LatentShape) -> Iterator[SavedTensor]:
    recipe = None if latent.has_qk_norm else shape.fp8_recipe
    for name, rank in (("query", latent.q_lora_rank), ("key-value", latent.kv_lora_rank)):
        if rank is not None:
            # 2sb rank/t: input of the up-projection, or of the norm fused into it.
            size_bytes = count_input_bytes(recipe, rows=shape.tokens, channels=rank)
            yield _make_input(f"compressed {name}", "qkv_linear", recipe, size_bytes)
        if latent.has_qk_norm:
            # Output of the fused norm, which is the linear's input, and statistics of the norm.
            size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=rank or shape.hidden_size)
            size_bytes += count_norm_statistics(shape)
            yield _make_input(f"normed input of the {name}", "qkv_linear", shape.fp8_recipe, size_bytes)
    # Cosine and sine, [s, 1, 1, qk_pos_emb_head_dim] in bf16, once for the query and once for the key. Heads share them, and
    # each rank has the whole sequence, so the size is not divided by t.
    yield _make("rotary tables", ("qkv_linear",), 4 * BF16 * shape.seq_length * latent.qk_pos_emb_head_dim)


def _list_core_attention(shape: LayerShape) -> Iterator[SavedTensor]:
    sizes = LayerSizes(shape)
    # 2sb(n dqk + g dqk + g dv)/t: each rank has the whole sequence and 1/t of the heads.
    yield _make("query, key and value", _CORE, sizes.query_key_value)
    # 2sbn dv/t: the projection after attention saves the same tensor, even with fp8, unless scaling is delayed.
    is_shared = shape.fp8_recipe != "delayed"
    yield _make("attention output", (*_CORE, "attn_proj") if is_shared else _CORE, sizes.attention_output)
    if not is_shared:
        size_bytes = _count_row_parallel_input(shape, shape.num_attention_heads * shape.v_channels)
        yield _make_input("attention output in fp8", "attn_proj", shape.fp8_recipe, size_bytes)
    # 4sbn/t: log-sum-exp of each row, [b, n / t, s, 1] in fp32.
    yield _make("log-sum-exp", _CORE, FP32 * shape.shared_tokens * shape.num_attention_heads, FP32)
    yield _make("random state", _CORE, _RANDOM_STATE_BYTES, INT64)
    if shape.has_attention_sinks:
        # 4n/t: a bf16 parameter that is converted to fp32, [1, n / t, 1, 1], and saved by attention.
        yield _make("attention sinks", _CORE, FP32 * shape.num_attention_heads // shape.tensor_parallel_size, FP32)
    # Start of each sequence and end of the last one, [b + 1]. All layers use the same tensor, for both query and key.
    yield _make("sequence lengths", _CORE, INT32 * (shape.micro_batch_size + 1), INT32, is_same_in_all_layers=True)


def _list_dense_mlp(shape: LayerShape) -> Iterator[SavedTensor]:
    yield from _list_mlp_norm(shape, "mlp_fc1")
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=shape.hidden_size)  # 2sbh/t
    yield _make_input("output of the norm before the MLP", "mlp_fc1", shape.fp8_recipe, size_bytes)
    rows, channels = LayerSizes(shape).rows, shape.ffn_hidden_size // shape.tensor_parallel_size
    # 4sbf/t: gate and up, [s, b, 2f / t]; 2sbf/t without a gate.
    yield _make("first linear's output", ("mlp_act",), _count_activation_input(shape, rows, channels))
    for name in _list_factors(shape):
        yield _make(name, ("mlp_act",), BF16 * rows * channels)  # 2sbf/t
    size_bytes = _count_row_parallel_input(shape, shape.ffn_hidden_size)  # 2sbf/t
    yield _make_input("activation's output", "mlp_fc2", shape.fp8_recipe, size_bytes)


def _list_mlp_norm(shape: LayerShape, tag: str) -> Iterator[SavedTensor]:
    yield _make("residual", (tag,), LayerSizes(shape).hidden)  # 2sbh/t
    yield _make("statistics of the norm before the MLP", (tag,), count_norm_statistics(shape), FP32)


def _list_mixture(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    yield from _list_mlp_norm(shape, "mlp_norm")
    shares = experts.shared_ffn_hidden_size and not _has_own_input(shape, experts)
    # The norm's output, 2sbh/t. The router saves it, and so do shared experts unless they gather or quantize their input.
    tags = (*_SHARED, *_ROUTER) if shares else _ROUTER
    yield _make("output of the norm before the MLP", tags, LayerSizes(shape).hidden)
    if experts.shared_ffn_hidden_size:
        yield from _list_shared_experts(shape, experts)
    yield from _list_router(shape, experts, experts.router)
    yield from _list_experts(shape, experts)
    yield from _list_combine(shape, experts)


def _has_own_input(shape: LayerShape, experts: ExpertsShape) -> bool:
    """Return whether the shared experts save a separate input instead of sharing the router's input."""
    return _gathers(shape, experts) or shape.fp8_recipe == "delayed"


def _gathers(shape: LayerShape, experts: ExpertsShape) -> bool:
    # With overlap, the shared experts run their own tensor-parallel collectives.
    return experts.has_shared_overlap and shape.tensor_parallel_size > 1


def _list_shared_experts(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    all_rows = LayerSizes(shape).rows
    if _has_own_input(shape, experts):
        # 2sbh if they gather, because they save the whole sequence. Only delayed scaling quantizes the saved input; other fp8
        # recipes save it in bf16.
        name, rows = "input of the shared experts in fp8", shape.tokens
        if _gathers(shape, experts):
            name, rows = "gathered input of the shared experts", all_rows
        recipe = shape.fp8_recipe if shape.fp8_recipe == "delayed" else None
        yield _make(name, _SHARED, count_input_bytes(recipe, rows=rows, channels=shape.hidden_size))
    channels = experts.shared_ffn_hidden_size // shape.tensor_parallel_size
    # Gate and up, 4sbf/t; each factor of an unfused activation, 2sbf/t; the activation's output, 2sbf/t.
    size_bytes = _count_activation_input(shape, all_rows, channels) + len(_list_factors(shape)) * BF16 * all_rows * channels
    size_bytes += _count_row_parallel_input(shape, experts.shared_ffn_hidden_size)
    yield _make("tensors inside the shared experts", _SHARED, size_bytes)


def _list_router(shape: LayerShape, experts: ExpertsShape, router: RouterShape) -> Iterator[SavedTensor]:
    # 8sbk/t: indices of the chosen experts in int64, saved by the ops that choose them and scatter their probabilities.
    yield _make("chosen experts", _ROUTER, INT64 * shape.tokens * experts.topk, INT64)
    if shape.is_deterministic:
        # 8sb/t: deterministic algorithms scatter with index_put, which saves row numbers, [sb / t, 1] in int64.
        yield _make("row numbers", _ROUTER, INT64 * shape.tokens, INT64)
    yield _make("scores", _ROUTER, _count_score_bytes(shape.tokens, experts, router), FP32)
    if router.balancing != "none":
        yield _make("balancing loss", _ROUTER, _count_balancing_bytes(shape, experts, router), FP32)


def _count_score_bytes(tokens: int, experts: ExpertsShape, router: RouterShape) -> int:
    if router.score_function == "softmax":
        # 4sbk/t: softmax saves its output, in fp32 for any router dtype. 4sbE/t if softmax precedes top-k.
        return FP32 * tokens * (experts.num_experts if router.has_pre_softmax else experts.topk)
    # 4sbE/t: sigmoid saves its output for all experts. Dividing the chosen scores by their sum saves both.
    chosen = experts.topk + 1 if experts.topk > 1 else 0
    return FP32 * tokens * (experts.num_experts + chosen)


def _count_balancing_bytes(shape: LayerShape, experts: ExpertsShape, router: RouterShape) -> int:
    # Token counts of each expert in int64, per sequence or per microbatch.
    counts = experts.num_experts * (shape.micro_batch_size if router.balancing == "seq_aux_loss" else 1)
    # 4sbE/t: softmax over all experts, or sigmoid and the sum that divides it. The loss is one number.
    columns = experts.num_experts + (0 if router.score_function == "softmax" else 1)
    return INT64 * counts + FP32 * (shape.tokens * columns + 1)


def _list_experts(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the saved tensors of the experts. With balanced routing, each rank has sbke/t rows of tokens in total."""
    rows, _ = count_expert_rows(shape, experts)
    channels = experts.ffn_hidden_size // experts.expert_tensor_parallel_size
    # 2sbkhe/t: each rank that shares an expert has all rows of the expert.
    size_bytes = _count_expert_input(shape, experts, shape.hidden_size)
    yield _make_input("permuted tokens", "expert_fc1", shape.fp8_recipe, size_bytes)
    yield _make("first linears' output", ("moe_act",), _count_activation_input(shape, rows, channels))  # 4sbkf/t: gate and up
    if shape.has_clamped_gate:
        # 4sbkf/t: the clamps save their input, and the activation saves their concatenated outputs.
        yield _make("clamped output", ("moe_act",), 2 * BF16 * rows * channels)
    for name in _list_factors(shape):
        yield _make(name, ("moe_act",), BF16 * rows * channels)  # 2sbkf/t
    if not (shape.is_gated and shape.has_fused_activation):
        # 2sbkf/t: a separate op multiplies by the probabilities and saves its input. The input is in bf16 even if the
        # probabilities are in fp32, because autograd saves the original tensor and conversions save nothing.
        yield _make("output of the bare activation", ("moe_act",), BF16 * rows * channels)
    # 2sbke/t, or 4sbke/t with an fp32 router: the probabilities that the activation applies, [sbke / t, 1].
    item_bytes = experts.router.dtype_bytes
    yield _make("permuted probabilities", ("moe_act",), item_bytes * rows, item_bytes)
    # 2sbkf/t.
    yield _make_input("activation's output", "expert_fc2", shape.fp8_recipe, _count_expert_input(shape, experts, channels))


def _count_expert_input(shape: LayerShape, experts: ExpertsShape, channels: int) -> int:
    rows, each = count_expert_rows(shape, experts)
    if shape.fp8_recipe is None:
        return BF16 * rows * channels
    # Each expert has its own scales.
    return experts.local_experts * count_input_bytes(shape.fp8_recipe, rows=each, channels=channels)


def _list_combine(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    tags = ("moe_combine",)
    if experts.has_fused_permutation:
        if experts.local_experts > 1:
            # 4sbke/t: a rank with several experts saves the order of its tokens, in int32.
            yield _make("order by expert", tags, INT32 * experts.count_rows(shape.tokens), INT32)
        # 4sb(2E + 1)/t: each token's destinations, its experts, and the number of experts, in int32.
        yield _make("row map", tags, INT32 * shape.tokens * (2 * experts.num_experts + 1), INT32)
        return
    # 8sbk/t: index of each permuted token, in int64. The index expanded over channels is a view of the same storage.
    yield _make("positions of the permuted tokens", tags, INT64 * shape.tokens * experts.topk, INT64)
    if shape.is_deterministic:
        # 2sbkh/t: deterministic algorithms use index_add, which saves its source.
        yield _make("experts' output", tags, LayerSizes(shape).permuted)


def _count_activation_input(shape: LayerShape, rows: int, channels: int) -> int:
    """Return the bytes of the first linear's output that an activation saves: `[rows, 2 channels]`, or half without a gate.

    An unfused activation saves only the gate. The gate is a view that spans everything except the up-projection of the last
    row, 2f/t, and the engine keeps or offloads the whole span.
    """
    if not shape.is_gated:
        return BF16 * rows * channels
    return BF16 * (2 * rows - (0 if shape.has_fused_activation else 1)) * channels


def _list_factors(shape: LayerShape) -> tuple[str, ...]:
    """Return the names of the tensors that an unfused gated activation multiplies and saves, each `[rows, channels]`.

    The up-projection is a separate tensor because Megatron adds `glu_linear_offset`, 0 by default, to it.

    Source: `MLP.forward` of megatron/core/transformer/mlp.py and `TEGroupedMLP.forward` of transformer/moe/experts.py,
    megatron-core 0.16.1. `tests/unit/megatron/test_saved_bytes.py` runs both on the CPU.
    """
    return ("activated gate", "up-projection with its offset") if shape.is_gated and not shape.has_fused_activation else ()


def _count_row_parallel_input(shape: LayerShape, channels: int) -> int:
    """Return the bytes of a row-parallel linear's saved input: 2sb channels/t in bf16."""
    rows = LayerSizes(shape).rows
    return count_input_bytes(shape.fp8_recipe, rows=rows, channels=channels // shape.tensor_parallel_size)


def list_untagged_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """Return the tensors that a layer saves outside all tags, in forward order. They stay on the GPU under any plan.

    A fully recomputed layer saves only the tensors of multi-token prediction.

    Source: the code of megatron-core 0.16.1 and Transformer Engine; `tests/unit/planner/memory/test_untagged_tensors.py` runs
    Megatron's functions on the CPU. Not measured on a GPU.
    """
    projection = _list_mtp_projection(shape) if shape.has_mtp_projection else ()
    found = (*projection, *_list_untagged_rotary(shape), *_list_dropout(shape))
    if shape.experts is None:
        return found
    return (*found, *_list_untagged_dispatch(shape, shape.experts), *_list_biases(shape, shape.experts))


def _list_mtp_projection(shape: LayerShape) -> Iterator[SavedTensor]:
    # Inputs, 2sbh/t, and statistics of three norms: of the next tokens' embeddings, of the hidden states, and after the layer.
    for name in ("embedding", "hidden states", "layer's output"):
        size_bytes = LayerSizes(shape).hidden + count_norm_statistics(shape)
        yield _make(f"{name} before the norm of multi-token prediction", (), size_bytes)
    # 4sbh/t: the concatenated outputs of the first two norms.
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=2 * shape.hidden_size)
    yield _make("input of the projection of multi-token prediction", (), size_bytes)


def _list_untagged_rotary(shape: LayerShape) -> Iterator[SavedTensor]:
    if not shape.rotary_channels or shape.latent is not None:
        return
    numbers = shape.seq_length * shape.rotary_channels
    if shape.has_fused_rotary:
        # 4s drot: the kernel saves the model's own embedding, in fp32.
        yield _make("rotary embedding", (), FP32 * numbers, is_same_in_all_layers=True)
        return
    # 8s drot: cosine and sine of the whole sequence in bf16, once for the query and once for the key.
    yield _make("rotary cosine and sine", (), 4 * BF16 * numbers)


def _list_dropout(shape: LayerShape) -> Iterator[SavedTensor]:
    if shape.has_hidden_dropout:
        # sbh/t bytes after attention, and the same after the MLP.
        yield _make("masks of dropout", (), 2 * shape.tokens * shape.hidden_size)


def _list_untagged_dispatch(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the tensors that the permutation saves in addition to those of `moe_combine`."""
    if not experts.has_fused_permutation:
        # 8sbE/t: sorted token positions for all experts, in int64. Megatron uses only the first entries.
        yield _make("sorted positions in the permutation", (), INT64 * shape.tokens * experts.num_experts)
    elif experts.local_experts > 1:
        # 4sbke/t: order of the tokens in int32, as in `_list_combine`.
        yield _make("row map that sorts tokens by expert", (), INT32 * experts.count_rows(shape.tokens))


def _list_biases(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the probabilities that autograd saves because they multiply the biases of the experts' second linears.

    `moe_act` saves the same storage, so offloading that tag does not free it. If the tag is kept, the storage is counted twice.

    Source: `TEGroupedMLP._apply_bias` of megatron/core/transformer/moe/experts.py, megatron-core 0.16.1.
    """
    if shape.has_linear_bias:
        # 2sbke/t, or 4sbke/t with an fp32 router.
        rows, _ = count_expert_rows(shape, experts)
        yield _make("probabilities that multiply biases of experts", (), experts.router.dtype_bytes * rows)
