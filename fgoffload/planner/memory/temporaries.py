"""Counts the temporary device bytes of each segment, in addition to the layer's saved tensors.

In forward, temporaries are the segment's input and output, unless an earlier segment saved them, and tensors gathered for
tensor parallelism. Tensors that Megatron's callers still reference are temporaries too, such as the output of the shared
experts until it is added. A tensor that the segment itself saves is temporary while the segment runs, and saved afterwards.

In backward, temporaries are the gradients of the segment's output and input, the residual's gradient until the norm adds it,
tensors gathered again, and weight gradients that are not yet accumulated.

Source: the code of Megatron-Core 0.16.1 and Transformer Engine 2.20; not compared with measurements.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape
from fgoffload.planner.operations.layer_sizes import (
    LayerSizes,
    count_compressed_bytes,
    count_normed_bytes,
    make_linear,
    make_mlp_linears,
)
from fgoffload.planner.operations.ops import BF16, FP32, Execution


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraBytes:
    """Temporary bytes of one segment."""

    forward: int = 0
    backward: int = 0


def count_extra_bytes(shape: LayerShape, execution: Execution) -> Mapping[str, ExtraBytes]:
    """Return the temporaries of each segment of a layer, keyed by segment name."""
    found = _count_attention(shape, execution)
    if shape.has_mtp_projection:
        hidden = LayerSizes(shape).hidden
        # The projection holds inputs, outputs and concatenated outputs of two norms, and its own output.
        found |= {
            "mtp_projection": ExtraBytes(forward=7 * hidden, backward=5 * hidden),
            "mtp_norm": ExtraBytes(forward=2 * hidden, backward=2 * hidden),
        }
    if shape.experts is None:
        return found | _count_dense(shape, execution)
    return found | _count_mixture(shape, shape.experts, execution)


def _count_attention(shape: LayerShape, execution: Execution) -> dict[str, ExtraBytes]:
    sizes = LayerSizes(shape)
    hidden, output = sizes.hidden, sizes.attention_output
    found = {} if shape.has_fused_attention_norm else {"attn_norm": _count_norm(sizes)}
    if shape.latent is None:
        found["qkv_linear"] = _count_projections(shape, execution)
    else:
        found |= _count_latent(shape, shape.latent)
    # Fused attention accumulates the query's gradient in fp32 (twice the query's bytes) and stores one number per row and head.
    rows = FP32 * shape.shared_tokens * shape.num_attention_heads
    found["core_attn"] = ExtraBytes(
        forward=sizes.query_key_value + output + rows, backward=hidden + output + sizes.query_key_value + 2 * sizes.query + rows
    )
    found["attn_proj"] = ExtraBytes(forward=sizes.gathered + 2 * hidden, backward=hidden + sizes.gathered + output)
    return found


def _count_norm(sizes: LayerSizes) -> ExtraBytes:
    # Forward holds an input and an output. Backward holds the gradients of both, and the residual's gradient.
    return ExtraBytes(forward=2 * sizes.hidden, backward=3 * sizes.hidden)


def _count_projections(shape: LayerShape, execution: Execution) -> ExtraBytes:
    sizes = LayerSizes(shape)
    hidden, together = sizes.hidden, sizes.query_key_value
    linear = make_linear(shape, sizes.rows, shape.hidden_size, together // (BF16 * sizes.rows))
    rotated = sizes.query + sizes.key if shape.rotary_channels else 0
    return ExtraBytes(
        # The gathered input is freed before the rotary embedding of query and key.
        forward=2 * hidden + together + max(sizes.gathered, rotated),
        # The three gradients are concatenated before the matrix products.
        backward=hidden
        + max(2 * together, together + 2 * sizes.gathered + 2 * hidden + linear.count_gradient_bytes(execution)),
    )


def _count_latent(shape: LayerShape, latent: LatentShape) -> dict[str, ExtraBytes]:
    sizes = LayerSizes(shape)
    compressed = count_compressed_bytes(shape, latent)
    gathered = compressed * shape.tensor_parallel_size if shape.tensor_parallel_size > 1 else 0
    normed = count_normed_bytes(shape, latent)
    # Query, key and value are assembled from the outputs of both projections, which are equally large.
    assembled = 2 * sizes.query_key_value
    return {
        "qkv_down": ExtraBytes(
            forward=sizes.hidden + compressed,
            # The tag `qkv_linear` covers this segment's saved tensors, which are still needed after that segment's backward.
            backward=3 * sizes.hidden + 2 * compressed,
        ),
        "qkv_linear": ExtraBytes(
            forward=sizes.hidden + compressed + normed + gathered + assembled,
            backward=sizes.hidden + assembled + 2 * gathered + compressed,
        ),
    }


def _count_dense(shape: LayerShape, execution: Execution) -> dict[str, ExtraBytes]:
    sizes = LayerSizes(shape)
    hidden, gathered, inner = sizes.hidden, sizes.gathered, sizes.dense_inner
    first, second = (linear.count_gradient_bytes(execution) for linear in make_mlp_linears(shape, shape.ffn_hidden_size))
    wide = sizes.gates * inner
    return {
        "mlp_fc1": ExtraBytes(forward=2 * hidden + gathered + wide, backward=3 * hidden + wide + 2 * gathered + first),
        "mlp_act": ExtraBytes(forward=wide + inner + _count_factors(shape, inner), backward=hidden + wide + inner),
        "mlp_fc2": ExtraBytes(forward=inner + gathered + 2 * hidden, backward=hidden + gathered + inner + second),
    }


def _count_mixture(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> dict[str, ExtraBytes]:
    sizes = LayerSizes(shape)
    found = {"mlp_norm": _count_norm(sizes)}
    if experts.shared_ffn_hidden_size:
        found["shared_expert"] = _count_shared(shape, experts, execution)
    routed = _count_router(sizes, experts) | _count_experts(sizes, experts, execution)
    # The output of the shared experts stays allocated until it is added.
    waiting = sizes.hidden if experts.shared_ffn_hidden_size else 0
    return found | {name: ExtraBytes(forward=one.forward + waiting, backward=one.backward) for name, one in routed.items()}


def _count_shared(shape: LayerShape, experts: ExpertsShape, execution: Execution) -> ExtraBytes:
    sizes = LayerSizes(shape)
    hidden, gathered, inner = sizes.hidden, sizes.gathered, sizes.shared_inner
    wide = sizes.gates * inner
    weights = sum(linear.count_gradient_bytes(execution) for linear in make_mlp_linears(shape, experts.shared_ffn_hidden_size))
    return ExtraBytes(
        forward=2 * hidden + gathered + wide + inner + _count_factors(shape, inner),
        # Gradients of the residual (the same tensor as the output's gradient) and of the norm's output, with the router's part.
        backward=2 * hidden + max(wide + inner, wide + 2 * gathered + hidden) + weights,
    )


def _count_router(sizes: LayerSizes, experts: ExpertsShape) -> dict[str, ExtraBytes]:
    hidden = sizes.hidden
    tables = FP32 * sizes.shape.tokens * experts.num_experts
    copied = 2 * hidden if experts.router.dtype_bytes == FP32 else 0
    return {
        # Forward holds logits, scores and probabilities of all experts. Backward holds the gradients of two of these.
        "router": ExtraBytes(forward=hidden + copied + 3 * tables, backward=3 * hidden + copied + 2 * tables),
        "dispatch": ExtraBytes(
            forward=sum(sizes.dispatch_steps), backward=hidden + _find_peak((hidden, *sizes.dispatch_steps))
        ),
    }


def _count_experts(sizes: LayerSizes, experts: ExpertsShape, execution: Execution) -> dict[str, ExtraBytes]:
    hidden, arrived, inner = sizes.hidden, sizes.arrived, sizes.expert_inner
    wide = sizes.gates * inner
    weights = BF16 * sizes.shape.hidden_size * experts.local_experts
    weights *= experts.ffn_hidden_size // experts.expert_tensor_parallel_size
    waiting = 0 if execution.has_fused_gradient_accumulation else weights
    # The dispatcher's callers reference the tokens of each dispatch step until the layer returns.
    held = sum(sizes.dispatch_steps[:-1])
    return {
        "expert_fc1": ExtraBytes(forward=held + arrived + wide, backward=hidden + wide + arrived + sizes.gates * waiting),
        "moe_act": _count_expert_activation(sizes, experts, held),
        "expert_fc2": _add_biases(
            sizes, experts, ExtraBytes(forward=held + inner + arrived, backward=hidden + arrived + inner + waiting)
        ),
        "moe_combine": ExtraBytes(
            forward=held + _find_peak((hidden, *sizes.dispatch_steps)),
            # The residual's gradient is the same tensor as the output's gradient.
            backward=hidden + _find_peak((0, *sizes.dispatch_steps)),
        ),
    }


def _add_biases(sizes: LayerSizes, experts: ExpertsShape, linear: ExtraBytes) -> ExtraBytes:
    """Add the temporaries for biases in the experts' second linears.

    Megatron multiplies each expert's bias by the probabilities, adds the product to the rows in the dtype of the probabilities,
    and concatenates the results. In backward it converts the output's gradient or splits it by expert, and concatenates the
    parts.

    Source: `TEGroupedMLP._apply_bias` of megatron-core 0.16.1, with live tensors counted on the CPU.
    """
    if not sizes.shape.has_linear_bias:
        return linear
    weighted = sizes.arrived * experts.router.dtype_bytes // BF16
    return ExtraBytes(
        forward=linear.forward + 2 * weighted, backward=max(linear.backward, sizes.hidden + sizes.arrived + weighted)
    )


def _count_factors(shape: LayerShape, inner: int) -> int:
    return 2 * inner if shape.is_gated and not shape.has_fused_activation else 0


def _count_expert_activation(sizes: LayerSizes, experts: ExpertsShape, held: int) -> ExtraBytes:
    """Return the temporaries of the experts' activation. In forward, the dispatcher's callers reference `held` more bytes."""
    inner, wide = sizes.expert_inner, sizes.gates * sizes.expert_inner
    factors = _count_factors(sizes.shape, inner)
    if sizes.shape.has_clamped_gate:
        # Forward: the outputs of both clamps and their concatenation, which is saved. Backward: two gradients of that size.
        return ExtraBytes(forward=held + 2 * wide + inner, backward=sizes.hidden + 2 * wide + inner)
    if not factors:
        return ExtraBytes(forward=held + wide + inner, backward=sizes.hidden + wide + inner)
    # The activation times the probabilities has the dtype of the probabilities. From its gradient, backward computes two
    # tensors of the same size, for the rows and for the probabilities. Later steps do not need more memory.
    weighted = inner * experts.router.dtype_bytes // BF16
    copied = inner if weighted > inner else 0
    return ExtraBytes(forward=held + wide + factors + inner + weighted + copied, backward=sizes.hidden + 3 * weighted)


def _find_peak(steps: Sequence[int]) -> int:
    """Return the maximum sum of two adjacent `steps`: each tensor exists until the next one is computed from it."""
    return max(one + other for one, other in itertools.pairwise(steps))
