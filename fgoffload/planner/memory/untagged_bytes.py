"""Bytes that a layer saves for backward outside of all tags, which stay on the device. Letters as in `saved_bytes`."""

from collections.abc import Iterator

from fgoffload.planner.memory.fp8_inputs import count_input_bytes
from fgoffload.planner.memory.saved_bytes import count_expert_rows, count_norm_statistics
from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape
from fgoffload.planner.operations.ops import BF16, FP32, INT32, INT64
from fgoffload.planner.ranks.layer_model import SavedTensor


def list_untagged_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """Return the tensors that a layer saves outside of all tags, in forward order. They stay on the device.

    A layer that is recomputed as a whole saves only those of multi-token prediction.

    Source: the code of megatron-core 0.16.1 and Transformer Engine; `tests/unit/planner/memory/test_untagged_tensors.py` runs
    the functions of the former on the CPU. Not measured on a GPU.
    """
    projection = _list_mtp_projection(shape) if shape.has_mtp_projection else ()
    of_experts = () if shape.experts is None else (*_list_dispatch(shape, shape.experts), *_list_biases(shape, shape.experts))
    return (*projection, *_list_rotary(shape), *_list_dropout(shape), *of_experts)


def _list_mtp_projection(shape: LayerShape) -> Iterator[SavedTensor]:
    # Norms of the next tokens' embeddings and of the hidden states, and one after the layer: inputs 2sbh/t, and statistics.
    for name in ("embedding", "hidden states", "layer's output"):
        size_bytes = BF16 * shape.tokens * shape.hidden_size + count_norm_statistics(shape)
        yield SavedTensor(name=f"{name} before the norm of multi-token prediction", tags=(), size_bytes=size_bytes)
    # 4sbh/t: the concatenated outputs of the first two norms.
    size_bytes = count_input_bytes(shape.fp8_recipe, rows=shape.tokens, channels=2 * shape.hidden_size)
    yield SavedTensor(name="input of the projection of multi-token prediction", tags=(), size_bytes=size_bytes)


def _list_rotary(shape: LayerShape) -> Iterator[SavedTensor]:
    if not shape.rotary_channels or shape.latent is not None:
        return
    numbers = shape.seq_length * shape.rotary_channels
    if shape.has_fused_rotary:
        # 4s drot: the kernel keeps the model's own embedding, in fp32.
        yield SavedTensor(name="rotary embedding", tags=(), size_bytes=FP32 * numbers, is_same_in_all_layers=True)
        return
    # 8s drot: cosine and sine in bf16, made once for the query and once for the key. Attention has the whole sequence.
    yield SavedTensor(name="rotary cosine and sine", tags=(), size_bytes=4 * BF16 * numbers)


def _list_dropout(shape: LayerShape) -> Iterator[SavedTensor]:
    if shape.has_hidden_dropout:
        # sbh/t bytes after attention, and as many after the MLP.
        size_bytes = 2 * shape.tokens * shape.hidden_size
        yield SavedTensor(name="masks of dropout", tags=(), size_bytes=size_bytes)


def _list_dispatch(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the tensors that the permutation saves beside those of `moe_combine`."""
    if not experts.has_fused_permutation:
        # 8sbE/t: the places of all tokens for all experts in int64; only the first, chosen ones are used.
        size_bytes = INT64 * shape.tokens * experts.num_experts
        yield SavedTensor(name="sorted places of the permutation", tags=(), size_bytes=size_bytes)
    elif experts.local_experts > 1:
        # 4sbke/t: as in the unpermutation.
        size_bytes = INT32 * experts.count_rows(shape.tokens)
        yield SavedTensor(name="order of arrival by expert", tags=(), size_bytes=size_bytes)


def _list_biases(shape: LayerShape, experts: ExpertsShape) -> Iterator[SavedTensor]:
    """Yield the tensors saved for the biases of the experts' second linears, each times the probabilities of its rows.

    The product saves those probabilities, and `moe_act` does too: offloading them with that tag frees nothing. If the tag stays
    they are counted twice, a number a row.

    Source: `TEGroupedMLP._apply_bias` of megatron/core/transformer/moe/experts.py, megatron-core 0.16.1.
    """
    if shape.has_linear_bias:
        # 2sbke/t, or 4sbke/t with a router in fp32.
        rows, _ = count_expert_rows(shape, experts)
        yield SavedTensor(name="probabilities beside biases of experts", tags=(), size_bytes=experts.router.dtype_bytes * rows)
