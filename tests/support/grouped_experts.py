"""What Megatron's grouped experts are, as far as `TEGroupedMLP.forward` asks: the linears of Transformer Engine need a GPU."""

import types
from collections.abc import Callable

import torch


def make_experts(
    linear_fc1: Callable[..., tuple[torch.Tensor, None]],
    *,
    is_fused: bool,
    is_recomputed: bool = False,
    offloads_activation: bool = False,
) -> types.SimpleNamespace:
    """Return experts whose forward is Megatron's own between two linears.

    Args:
        linear_fc1: Called with the tokens and the tokens of each expert. The second linear saves what it is given.
        is_fused: Whether activation and probabilities are one kernel.
        is_recomputed: Whether they run again in backward.
        offloads_activation: Whether they are a site of the tag `moe_act`.
    """
    config = types.SimpleNamespace(
        fp8=None,
        fp4=None,
        moe_apply_probs_on_input=False,
        use_te_activation_func=False,
        bias_activation_fusion=is_fused,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        activation_func_clamp_value=None,
        activation_func_fp8_input_store=False,
        glu_linear_offset=0.0,
        # What the development branch asks.
        moe_mlp_glu_interleave_size=None,
        delay_offload_until_cuda_graph=False,
        moe_router_padding_for_quantization=False,
        moe_token_dispatcher_type="alltoall",
        moe_use_grouped_tensor=False,
    )
    return types.SimpleNamespace(
        config=config,
        activation_func=torch.nn.functional.silu,
        activation_recompute=is_recomputed,
        offload_expert_fc1=False,
        _with_fused_impl=False,
        _use_grouped_tensor=False,
        offload_moe_act=offloads_activation,
        linear_fc1=linear_fc1,
        linear_fc2=lambda hidden, _: (hidden.sin(), None),
        _apply_bias=lambda output, *_: output,
    )
