"""Lists the operations of a layer's attention half, from its norm to the residual add after the projection.

The segments are `attn_norm` (if the norm is not fused), `qkv_linear`, `core_attn` and `attn_proj`. Latent attention has
`qkv_down` before `qkv_linear`, because the up-projections can be recomputed without the down-projections.
"""

import dataclasses

from fgoffload.planner.model.layer_shape import LatentShape, LayerShape
from fgoffload.planner.operations.layer_sizes import LayerSizes, count_normed_bytes, make_linear
from fgoffload.planner.operations.ops import (
    BF16,
    Execution,
    Limit,
    Linear,
    PassWork,
    Pattern,
    SegmentWork,
    Traffic,
    Work,
    list_ring_pass,
    make_moves,
)


def list_attention_work(shape: LayerShape, execution: Execution) -> tuple[SegmentWork, ...]:
    """Return the operations of each segment of the attention half, in forward order."""
    norm = make_norm_work("attn_norm", shape)
    projections = (
        _list_projection_work(shape, execution) if shape.latent is None else _list_latent_work(shape, shape.latent, execution)
    )
    if shape.has_fused_attention_norm:
        projections = (fuse_norm(norm, projections[0]), *projections[1:])
    else:
        projections = (norm, *projections)
    return (*projections, _make_core_work(shape, execution), _make_output_work(shape, execution))


def make_norm_work(name: str, shape: LayerShape) -> SegmentWork:
    """Return the operations of a norm. Backward adds the norm's gradient to the residual's gradient."""
    hidden = LayerSizes(shape).hidden
    # Forward reads one tensor and writes one. In backward, the norm and the addition each read two tensors and write one.
    backward = (make_moves(3 * hidden, kernels=2), make_moves(3 * hidden))
    return SegmentWork(name, PassWork((make_moves(2 * hidden),)), PassWork(backward))


def fuse_norm(norm: SegmentWork, linear: SegmentWork) -> SegmentWork:
    """Return the segment `linear` with the operations of the fused `norm` included."""
    forward = dataclasses.replace(linear.forward, works=(*norm.forward.works, *linear.forward.works))
    backward = dataclasses.replace(linear.backward, works=(*linear.backward.works, *norm.backward.works))
    return SegmentWork(linear.name, forward, backward)


def make_residual_works(shape: LayerShape, execution: Execution) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the forward and backward operations of dropout and of the residual addition."""
    hidden = LayerSizes(shape).hidden
    # The fused op reads two tensors and writes one. Without fusion, dropout first reads one tensor and writes one.
    forward = make_moves(3 * hidden) if execution.has_fused_dropout_add else make_moves(5 * hidden, kernels=2)
    return (forward,), (make_moves(2 * hidden),)


def list_input_traffic(shape: LayerShape, channels: int) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
    """Return the traffic of column-parallel linears, before forward and during the matrix products of backward.

    With sequence parallelism, ranks gather the input in forward and in backward, and reduce-scatter its gradient. Without it,
    all ranks have the input and all-reduce its gradient.
    """
    ring = list_ring_pass(BF16 * LayerSizes(shape).rows * channels, shape.tensor_parallel_size)
    return ring if shape.has_sequence_parallel else (), 2 * ring


def list_output_traffic(shape: LayerShape, channels: int) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
    """Return the traffic of row-parallel linears, in forward and in backward.

    With sequence parallelism, ranks reduce-scatter the output and gather its gradient. Without it, they all-reduce the output,
    and all ranks have its gradient.
    """
    ring = list_ring_pass(BF16 * LayerSizes(shape).rows * channels, shape.tensor_parallel_size)
    return (ring, ring) if shape.has_sequence_parallel else (2 * ring, ())


def _list_projection_work(shape: LayerShape, execution: Execution) -> tuple[SegmentWork, ...]:
    sizes = LayerSizes(shape)
    channels = sizes.query_key_value // (BF16 * sizes.rows)
    linear = make_linear(shape, sizes.rows, shape.hidden_size, channels)
    rotated = sizes.query + sizes.key
    norms = (make_moves(2 * rotated, kernels=2),) if shape.has_qk_norm else ()
    norms_backward = (make_moves(3 * rotated, kernels=4),) if shape.has_qk_norm else ()
    rope = _list_rope(shape, rotated) if shape.rotary_channels else ()
    gather, beside = list_input_traffic(shape, shape.hidden_size)
    return (
        SegmentWork(
            "qkv_linear",
            PassWork((*linear.list_forward(), *norms, *rope), traffic=gather),
            # Backward concatenates the gradients of query, key and value.
            PassWork(
                (*rope, *norms_backward, make_moves(2 * sizes.query_key_value), *linear.list_backward(execution)), beside=beside
            ),
        ),
    )


def _list_latent_work(shape: LayerShape, latent: LatentShape, execution: Execution) -> tuple[SegmentWork, ...]:
    rows, heads = LayerSizes(shape).rows, shape.num_attention_heads // shape.tensor_parallel_size
    # Each rank compresses its own part of the sequence.
    hidden, tokens = shape.hidden_size, shape.tokens
    down = [make_linear(shape, tokens, hidden, latent.kv_lora_rank + latent.qk_pos_emb_head_dim)]
    key_value = shape.qk_channels - latent.qk_pos_emb_head_dim + shape.v_channels
    up = [make_linear(shape, rows, latent.kv_lora_rank, heads * key_value)]
    query_inputs = hidden
    if latent.q_lora_rank is not None:
        down.insert(0, make_linear(shape, tokens, hidden, latent.q_lora_rank))
        query_inputs = latent.q_lora_rank
    up.insert(0, make_linear(shape, rows, query_inputs, heads * shape.qk_channels))
    return (
        SegmentWork(
            "qkv_down",
            PassWork(tuple(work for linear in down for work in linear.list_forward())),
            PassWork(tuple(work for linear in down for work in linear.list_backward(execution))),
        ),
        _make_up_projections(shape, latent, execution, up),
    )


def _make_up_projections(shape: LayerShape, latent: LatentShape, execution: Execution, linears: list[Linear]) -> SegmentWork:
    sizes = LayerSizes(shape)
    query_channels = shape.hidden_size if latent.q_lora_rank is None else latent.q_lora_rank
    gather, beside = list_input_traffic(shape, query_channels + latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    norms: tuple[Work, ...] = ()
    if latent.has_qk_norm:
        norms = (make_moves(2 * count_normed_bytes(shape, latent), kernels=2),)
    # Rotary embeddings write the whole query and key (9 times their bytes), and a copy makes the value contiguous.
    rope = (make_moves(9 * (sizes.query + sizes.key), kernels=10), make_moves(2 * sizes.value))
    return SegmentWork(
        "qkv_linear",
        PassWork((*norms, *(work for linear in linears for work in linear.list_forward()), *rope), traffic=gather),
        PassWork((*rope, *(work for linear in linears for work in linear.list_backward(execution)), *2 * norms), beside=beside),
    )


def _list_rope(shape: LayerShape, rotated_bytes: int) -> tuple[Work, ...]:
    if shape.has_fused_rotary:
        return (make_moves(2 * rotated_bytes, kernels=2),)
    # Rotate the halves, multiply by cosine and by sine, add, and concatenate: 3 + 2 + 2 + 3 + 2 times the bytes. Halves are
    # strided, and cosine and sine are broadcast over heads. Traces of Llama 3 8B and GPT-OSS match to within 20% (H100, H200).
    return (make_moves(12 * rotated_bytes, strided_bytes=10 * rotated_bytes, kernels=10),)


def _make_core_work(shape: LayerShape, execution: Execution) -> SegmentWork:
    sizes = LayerSizes(shape)
    heads = shape.num_attention_heads // shape.tensor_parallel_size
    # 2 operations per query-key pair, head and channel. Forward has one product over the query and key channels (dqk) and one
    # over the value channels (dv). Backward has three over dqk and two over dv. One of these repeats a product of forward.
    flop = 2 * _count_pairs(shape, execution) * shape.micro_batch_size * heads
    saved = sizes.query_key_value + sizes.attention_output
    forward = Work(
        limit=Limit.ATTENTION_FORWARD,
        flop=flop * (shape.qk_channels + shape.v_channels),
        moved_bytes=saved,
        head_channels=shape.v_channels,
    )
    backward = Work(
        limit=Limit.ATTENTION_BACKWARD,
        flop=flop * (3 * shape.qk_channels + 2 * shape.v_channels),
        moved_bytes=2 * saved,
        kernels=3,
        head_channels=shape.v_channels,
        attention_rows=sizes.rows * heads,
        sink_rows=sizes.rows * heads if shape.has_attention_sinks else 0,
    )
    ring = _list_ring(shape, execution, sizes.key + sizes.value)
    # In backward, ranks also send the gradients of keys and values around the ring.
    return SegmentWork("core_attn", PassWork((forward,), beside=ring), PassWork((backward,), beside=2 * ring))


def _count_pairs(shape: LayerShape, execution: Execution) -> float:
    """Return the query-key pairs per sequence and rank. All ranks together have s²/2, or sw - w²/2 with window w."""
    ranks = execution.context_parallel_size
    tokens = shape.seq_length * ranks
    window = tokens if execution.window_tokens is None else min(execution.window_tokens, tokens)
    return (tokens * window - window * window / 2) / ranks


def _list_ring(shape: LayerShape, execution: Execution, key_value_bytes: int) -> tuple[Traffic, ...]:
    ranks = execution.context_parallel_size
    if ranks == 1:
        return ()
    span = ranks * shape.tensor_parallel_size
    return (Traffic(pattern=Pattern.RING, sent_bytes=key_value_bytes * (ranks - 1), ranks=ranks, span=span, calls=ranks - 1),)


def _make_output_work(shape: LayerShape, execution: Execution) -> SegmentWork:
    sizes = LayerSizes(shape)
    inputs = shape.num_attention_heads // shape.tensor_parallel_size * shape.v_channels
    linear = make_linear(shape, sizes.rows, inputs, shape.hidden_size)
    add, add_backward = make_residual_works(shape, execution)
    summed, gather = list_output_traffic(shape, shape.hidden_size)
    return SegmentWork(
        "attn_proj",
        PassWork((*linear.list_forward(), *add), traffic=summed),
        PassWork((*add_backward, *linear.list_backward(execution)), traffic=gather),
    )
