"""Lists the operations of a layer's second half: a dense MLP, or router, dispatch and experts.

A dense MLP, with its norm fused into the first linear, has the segments `mlp_fc1`, `mlp_act` and `mlp_fc2`. A mixture of
experts has `mlp_norm`, `shared_expert`, `router`, `dispatch`, `expert_fc1`, `moe_act`, `expert_fc2` and `moe_combine`.
"""

from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape
from fgoffload.planner.operations.attention_ops import (
    fuse_norm,
    list_input_traffic,
    list_output_traffic,
    make_norm_work,
    make_residual_works,
)
from fgoffload.planner.operations.layer_sizes import LayerSizes, make_linear, make_mlp_linears
from fgoffload.planner.operations.ops import FP32, Execution, Limit, PassWork, Pattern, SegmentWork, Traffic, Work, make_moves

_ROUTER_TABLES = 6
"""Number of fp32 [tokens, experts] tensors that the router reads or writes in forward, and again in backward: logits, scores,
top-k choice, routing map, probabilities. Counted in the code of Megatron-Core 0.16.1, not measured."""

_ROUTER_KERNELS = 20
_PERMUTE_KERNELS = 10
_FUSED_PERMUTE_KERNELS = 3  # all three: per forward or backward, counted in the code of Megatron-Core 0.16.1

_DISPATCHER_LAUNCHES = 80
"""Host time of Megatron's Python code around router, dispatcher and grouped linears, in forward or in backward, expressed as a
number of kernel launches. Source: the forward and backward of a layer with 16 experts take about 9 ms of host time on an
H200 (`HOST_LAYER_S`) and on a B200 (Qwen3-30B, microbatch size 1, Megatron Bridge 26.02). Kernel launches take half of that."""

_OUTPUT_BIAS_BYTES = (24, 30)
"""Bytes moved per element of the experts' output, forward and backward, if the second linears have biases. Multiplying by the
fp32 probabilities, adding, concatenating and converting to bf16 are separate ops. Source: `_apply_bias` of
megatron/core/transformer/moe/experts.py, megatron-core 0.19.2."""

_OUTPUT_BIAS_KERNELS = (2, 5)  # kernels per expert, in forward and in backward

_UNFUSED_GATE = (2 + 2 + 3, 2 + 2, 3, 3 + 3 + 3 + 4, 3, 4)
"""Costs of an unfused gated activation in forward: number of tensors moved, each as large as the output; number of strided ones
among them (reads of half the columns); number of kernels. Then the same for backward. Forward computes the activation, the
sum of up-projection and offset, and the product. Backward computes three gradients and concatenates both halves. Source: code
of Megatron-Core 0.16.1 and of torch's autograd; traces of W2 on H100 and H200 show these kernels."""

_UNFUSED_PROBABILITIES = (2, 2, 1, 2 + 3 + 1, 2, 3)
"""The same costs for multiplying by the probabilities, one per row. Backward computes the gradient of the rows and, for
the gradient of the probabilities, a product of two tensors, which it writes, reads and sums."""

_UNFUSED_FP32_PROBABILITIES = (3 + 3, 3, 2, 3 + 4 + 3 + 5 + 2, 4, 5)
"""The same costs with fp32 probabilities: products are twice as large and are converted to bf16. Backward first converts the
gradient to fp32, and converts the gradient of the rows back to bf16."""

_CLAMP = (8, 10)
"""Number of tensors moved to clamp both halves of the activation's input, in forward and in backward, each as large as the
activation's output. In forward, each clamp reads and writes half, and a concatenation moves both. In backward, each clamp reads
a gradient and its input. Source: `weighted_bias_quick_geglu_impl` of megatron/core/fusions/fused_bias_geglu.py, 0.19.2."""


def list_mlp_work(shape: LayerShape, execution: Execution) -> tuple[SegmentWork, ...]:
    """Return the operations of each segment of the layer's second half, in forward order."""
    norm = make_norm_work("mlp_norm", shape)
    if shape.experts is not None:
        return (norm, *_list_mixture_work(shape, shape.experts, execution))
    first, *others = _list_dense_work(shape, execution)
    return (fuse_norm(norm, first), *others)


def make_activation_works(shape: LayerShape, inner_bytes: int, *, probability_bytes: int = 0) -> tuple[Work, Work]:
    """Return the operations of an activation function, in forward and in backward."""
    if shape.is_gated and not shape.has_fused_activation:
        return _make_unfused_works(inner_bytes, probability_bytes)
    # One kernel reads one or two tensors and writes one. Backward reads them and a gradient, and writes their gradients.
    gates = LayerSizes(shape).gates
    return make_moves((gates + 1) * inner_bytes), make_moves((2 * gates + 1) * inner_bytes)


def _make_unfused_works(inner_bytes: int, probability_bytes: int) -> tuple[Work, Work]:
    moves = [_UNFUSED_GATE]
    if probability_bytes:
        moves.append(_UNFUSED_FP32_PROBABILITIES if probability_bytes == FP32 else _UNFUSED_PROBABILITIES)
    forward, strided, kernels, back, back_strided, back_kernels = (sum(column) for column in zip(*moves, strict=True))
    return (
        make_moves(forward * inner_bytes, strided_bytes=strided * inner_bytes, kernels=kernels),
        make_moves(back * inner_bytes, strided_bytes=back_strided * inner_bytes, kernels=back_kernels),
    )


def _list_dense_work(shape: LayerShape, execution: Execution) -> tuple[SegmentWork, ...]:
    first, second = make_mlp_linears(shape, shape.ffn_hidden_size)
    activation, activation_backward = make_activation_works(shape, LayerSizes(shape).dense_inner)
    add, add_backward = make_residual_works(shape, execution)
    gather, beside = list_input_traffic(shape, shape.hidden_size)
    summed, gather_back = list_output_traffic(shape, shape.hidden_size)
    return (
        SegmentWork(
            "mlp_fc1", PassWork(first.list_forward(), traffic=gather), PassWork(first.list_backward(execution), beside=beside)
        ),
        SegmentWork("mlp_act", PassWork((activation,)), PassWork((activation_backward,))),
        SegmentWork(
            "mlp_fc2",
            PassWork((*second.list_forward(), *add), traffic=summed),
            PassWork((*add_backward, *second.list_backward(execution)), traffic=gather_back),
        ),
    )


def _list_mixture_work(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> tuple[SegmentWork, ...]:
    # Megatron runs shared experts before the router, unless they overlap with the dispatch (see `op_times`).
    shared = (_make_shared_work(shape, experts, execution),) if experts.shared_ffn_hidden_size else ()
    return (
        *shared,
        _make_router_work(shape, experts),
        _make_dispatch_work(shape, experts),
        *_list_expert_work(shape, experts, execution),
        _make_combine_work(shape, experts, execution),
    )


def _make_shared_work(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> SegmentWork:
    first, second = make_mlp_linears(shape, experts.shared_ffn_hidden_size)
    activation, activation_backward = make_activation_works(shape, LayerSizes(shape).shared_inner)
    gather, beside = list_input_traffic(shape, shape.hidden_size)
    summed, gather_back = list_output_traffic(shape, shape.hidden_size)
    return SegmentWork(
        "shared_expert",
        PassWork((*first.list_forward(), activation, *second.list_forward()), traffic=(*gather, *summed)),
        PassWork(
            (*second.list_backward(execution), activation_backward, *first.list_backward(execution)),
            traffic=gather_back,
            beside=beside,
        ),
    )


def _make_router_work(shape: LayerShape, experts: ExpertsShape) -> SegmentWork:
    hidden = LayerSizes(shape).hidden
    flop = 2 * shape.tokens * shape.hidden_size * experts.num_experts
    tables = make_moves(_ROUTER_TABLES * FP32 * shape.tokens * experts.num_experts, kernels=_ROUTER_KERNELS)
    # An fp32 router writes and reads an fp32 copy of its input.
    input_bytes = hidden + (2 * (2 * hidden) if experts.router.dtype_bytes == FP32 else 0)
    product = Work(limit=Limit.MATMUL, flop=flop, moved_bytes=input_bytes)
    # Backward reads the input, writes its gradient, and adds it to the gradients from other uses of the input.
    backward = Work(limit=Limit.MATMUL, flop=2 * flop, moved_bytes=input_bytes + 4 * hidden, kernels=3)
    return SegmentWork("router", PassWork((product, tables)), PassWork((tables, backward)))


def _make_dispatch_work(shape: LayerShape, experts: ExpertsShape) -> SegmentWork:
    sizes = LayerSizes(shape)
    moved, moved_back, kernels = _count_permutation(sizes, experts)
    sort = _list_sort(sizes, experts)
    # One call for the tokens, and one for their probabilities.
    exchange = _list_exchange(sizes, experts, calls=2)
    forward = (*_list_count_exchange(experts), *exchange)
    return SegmentWork(
        "dispatch",
        PassWork((make_moves(moved, kernels=kernels), *sort), traffic=forward, host_launches=_DISPATCHER_LAUNCHES),
        PassWork((*sort, make_moves(moved_back, kernels=kernels)), traffic=exchange, host_launches=_DISPATCHER_LAUNCHES),
    )


def _list_expert_work(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> tuple[SegmentWork, ...]:
    sizes = LayerSizes(shape)
    rows, local = sizes.expert_rows, experts.local_experts
    width = experts.ffn_hidden_size // experts.expert_tensor_parallel_size
    first = make_linear(shape, rows, shape.hidden_size, sizes.gates * width, experts=local)
    second = make_linear(shape, rows, width, shape.hidden_size, experts=local)
    activation = make_activation_works(shape, sizes.expert_inner, probability_bytes=experts.router.dtype_bytes)
    clamp = [make_moves(moved * sizes.expert_inner, kernels=3) for moved in _CLAMP] if shape.has_clamped_gate else []
    bias, bias_backward = _list_output_bias(shape, experts, rows)
    return (
        SegmentWork("expert_fc1", PassWork(first.list_forward()), PassWork(first.list_backward(execution))),
        SegmentWork("moe_act", PassWork((*clamp[:1], activation[0])), PassWork((activation[1], *clamp[1:]))),
        SegmentWork(
            "expert_fc2",
            PassWork((*second.list_forward(), *bias)),
            PassWork((*bias_backward, *second.list_backward(execution))),
        ),
    )


def _list_output_bias(shape: LayerShape, experts: ExpertsShape, rows: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    if not shape.has_linear_bias:
        return (), ()
    moves = [
        make_moves(item_bytes * rows * shape.hidden_size, kernels=kernels * experts.local_experts)
        for item_bytes, kernels in zip(_OUTPUT_BIAS_BYTES, _OUTPUT_BIAS_KERNELS, strict=True)
    ]
    return (moves[0],), (moves[1],)


def _make_combine_work(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> SegmentWork:
    sizes = LayerSizes(shape)
    # The forward of combine moves the same bytes as the backward of dispatch, and vice versa.
    moved_back, moved, kernels = _count_permutation(sizes, experts)
    sort, exchange = _list_sort(sizes, experts), _list_exchange(sizes, experts)
    add, add_backward = make_residual_works(shape, execution)
    shared = (make_moves(3 * sizes.hidden),) if experts.shared_ffn_hidden_size else ()
    return SegmentWork(
        "moe_combine",
        PassWork((*sort, make_moves(moved, kernels=kernels), *shared, *add), traffic=exchange),
        PassWork((*add_backward, make_moves(moved_back, kernels=kernels), *sort), traffic=exchange),
    )


def count_permutation_part(shape: LayerShape, experts: ExpertsShape) -> float:
    """Return the permutation's fraction of the memory traffic of `dispatch`, which also sorts by expert."""
    sizes = LayerSizes(shape)
    moved, _, _ = _count_permutation(sizes, experts)
    return moved / (moved + _count_sorted(sizes, experts))


def _count_permutation(sizes: LayerSizes, experts: ExpertsShape) -> tuple[int, int, int]:
    """Return the memory traffic in bytes of permuting tokens and of unpermuting them, and the number of kernels for each."""
    if experts.has_fused_permutation:
        # Each token is read once and written once per expert; unpermuting does the reverse.
        moved = sizes.hidden + sizes.permuted
        return moved, moved, _FUSED_PERMUTE_KERNELS
    # Each token is read and written once per expert. Unpermuting adds the copies one by one to a tensor of zeros.
    return 2 * sizes.permuted, 3 * sizes.permuted + sizes.hidden, _PERMUTE_KERNELS


def _list_sort(sizes: LayerSizes, experts: ExpertsShape) -> tuple[Work, ...]:
    moved = _count_sorted(sizes, experts)
    return (make_moves(moved, kernels=2),) if moved else ()


def _count_sorted(sizes: LayerSizes, experts: ExpertsShape) -> int:
    # If a rank has several experts, the sort by expert reads and writes all rows.
    return 2 * sizes.arrived if experts.local_experts > 1 else 0


def _list_exchange(sizes: LayerSizes, experts: ExpertsShape, *, calls: int = 1) -> tuple[Traffic, ...]:
    """Return the all-to-all traffic of the rank with the most rows, and the gather among ranks that share an expert."""
    found = []
    ranks, sharing = experts.expert_parallel_size, experts.expert_tensor_parallel_size
    if ranks > 1:
        # Each rank receives an equal part, and one part stays on this rank.
        sent_bytes = sizes.arrived / sharing * (ranks - 1) / ranks
        pattern = Pattern.ALL_TO_ALL if experts.dispatcher == "alltoall" else Pattern.NODES
        found.append(
            Traffic(
                pattern=pattern,
                sent_bytes=sent_bytes,
                ranks=ranks,
                span=ranks * sharing,
                calls=calls,
                copies=experts.topk,
                limited_groups=experts.limited_groups,
            )
        )
    if sharing > 1:
        sent_bytes = sizes.arrived / sharing * (sharing - 1)
        found.append(Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=sharing, span=sharing, calls=calls))
    return tuple(found)


def _list_count_exchange(experts: ExpertsShape) -> tuple[Traffic, ...]:
    ranks = experts.expert_parallel_size
    # The exchange of token counts per expert, whose bytes are too few to matter.
    return () if ranks == 1 else (Traffic(pattern=Pattern.RING, sent_bytes=0.0, ranks=ranks, span=ranks),)
