"""CPU versions of the grouped linears that `TEGroupedMLP.forward` needs. Transformer Engine's own linears need a GPU."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fgoffload.integrations.megatron.patching.imports import load_module


def make_experts(
    linear_fc1: Callable[..., tuple[torch.Tensor, None]],
    *,
    is_fused: bool,
    is_recomputed: bool = False,
    is_clamped: bool = False,
    offloads_activation: bool = False,
) -> types.SimpleNamespace:
    """Return experts that run Megatron's own forward between two linears.

    Args:
        linear_fc1: Called with the tokens and the token counts of the experts. The second linear saves its input.
        is_fused: Whether activation and probabilities are one kernel.
        is_recomputed: Whether both are recomputed in backward.
        is_clamped: Whether the gate is GPT-OSS's quick GEGLU with clamped halves.
        offloads_activation: Whether both are a site of the tag `moe_act`.
    """
    activation = load_module("megatron.core.fusions.fused_bias_geglu").quick_gelu if is_clamped else torch.nn.functional.silu
    config = types.SimpleNamespace(
        fp8=None,
        fp4=None,
        moe_apply_probs_on_input=False,
        use_te_activation_func=False,
        bias_activation_fusion=is_fused,
        gated_linear_unit=True,
        activation_func=activation,
        activation_func_clamp_value=7.0 if is_clamped else None,
        activation_func_fp8_input_store=False,
        glu_linear_offset=0.0,
        # Fields that the development branch reads.
        moe_mlp_glu_interleave_size=None,
        delay_offload_until_cuda_graph=False,
        moe_router_padding_for_quantization=False,
        moe_token_dispatcher_type="alltoall",
        moe_use_grouped_tensor=False,
    )
    return types.SimpleNamespace(
        config=config,
        activation_func=activation,
        activation_recompute=is_recomputed,
        offload_expert_fc1=False,
        _with_fused_impl=False,
        _use_grouped_tensor=False,
        offload_moe_act=offloads_activation,
        linear_fc1=_Function(linear_fc1),
        linear_fc2=_Function(lambda hidden, _: (hidden.sin(), None)),
        _apply_bias=lambda output, *_: output,
    )


class _Function(torch.nn.Module):
    """Wraps a function in a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


class GroupedLinear(torch.nn.Module):
    """Runs all experts in turn. Megatron builds it in place of Transformer Engine's, with the same arguments."""

    save_original_input = False
    """An option of Transformer Engine without effect here, since autograd saves parts of one input."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        init_method: Callable[[torch.Tensor], object],
        bias: bool = False,
        skip_bias_add: bool = False,
        **_: object,
    ) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.empty(outputs, inputs) for _ in range(experts))
        self.biases = torch.nn.ParameterList(torch.zeros(outputs) for _ in range(experts if bias else 0))
        self.returns_biases = bias and skip_bias_add
        for weight in self.weights:
            init_method(weight)

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.nn.Parameter] | None]:
        parts = torch.split(hidden, tokens_per_expert)
        outputs = [part @ weight.T for part, weight in zip(parts, self.weights, strict=True)]
        if self.returns_biases:
            return torch.cat(outputs), list(self.biases)
        if self.biases:
            outputs = [output + bias for output, bias in zip(outputs, self.biases, strict=True)]
        return torch.cat(outputs), None


@contextlib.contextmanager
def grouped_experts() -> Iterator[None]:
    """Let Megatron's local layers use its grouped experts with the linears above inside the context."""
    experts = load_module("megatron.core.transformer.moe.experts")
    provider = load_module("megatron.core.models.backends").LocalSpecProvider
    linears: dict[str, Any] = {"linear_fc1": GroupedLinear, "linear_fc2": GroupedLinear}
    modules: Any
    if hasattr(experts, "GroupedMLPSubmodules"):  # since 0.17
        modules = functools.partial(experts.TEGroupedMLP, submodules=experts.GroupedMLPSubmodules(**linears))
    else:
        modules = experts.TEGroupedMLP, load_module("megatron.core.transformer.mlp").MLPSubmodules(**linears)
    with mock.patch.object(provider, "grouped_mlp_modules", return_value=modules):
        yield
