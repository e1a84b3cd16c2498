"""CPU norms, linears and attention that save the same tensors as Transformer Engine's, whose kernels need a GPU.

They follow the source of Transformer Engine before 2.20 (`ops/basic/rmsnorm.py`, `prepare_forward` of `module/base.py`, and
`FusedAttnFunc`), not our formulas. The replacements determine which inputs a kernel saves. Megatron's own code determines which
kernels run, and with which inputs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fgoffload.integrations.megatron.patching.imports import load_module
from support.grouped_experts import grouped_experts
from support.versions import is_installed


class FusedNorm(torch.nn.Module):
    """An RMSNorm, which Megatron builds in place of its local norms, with the same arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise NotImplementedError(f"{config.normalization} instead of RMSNorm.")
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = _Norm.apply(hidden, self.weight, self._eps)
        return normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = hidden.contiguous().view(-1, hidden.size(-1))
        scales = torch.rsqrt(rows.float().square().mean(-1) + eps)  # [rows] in fp32
        ctx.save_for_backward(rows, weight, scales)
        ctx.shape = hidden.shape
        return (rows * scales.unsqueeze(1) * weight).to(hidden.dtype).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        gradient = gradient.reshape(rows.shape)
        normed = rows * scales.unsqueeze(1)
        weighted = gradient * weight
        inner = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * scales.unsqueeze(1)
        return inner.to(rows.dtype).view(ctx.shape), (gradient * normed).sum(0).to(weight.dtype), None


class FusedAttention(torch.nn.Module):
    """Saves the same tensors as fused attention, but returns the values unchanged.

    Megatron builds it in place of `DotProductAttention`, with the same arguments.
    """

    def __init__(self, config: Any, *_: Any, lengths: dict[int, torch.Tensor], **__: Any) -> None:
        super().__init__()
        self._lengths = lengths
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Map query, key and value `[s, b, heads or groups, channels]` to `[s, b, heads * channels of value]`."""
        length, batch = query.shape[:2]
        if batch not in self._lengths:
            self._lengths[batch] = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
        offset = None if self.softmax_offset is None else self.softmax_offset.reshape(1, -1, 1, 1).to(torch.float32)
        tensors = (tensor.contiguous() for tensor in (query, key, value))
        attended: torch.Tensor = _Attention.apply(*tensors, self._lengths[batch], offset)
        return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        offset: torch.Tensor | None,
    ) -> torch.Tensor:
        length, batch, heads, _ = query.shape
        output = value.repeat_interleave(heads // value.size(2), dim=2).clone()
        log_sums = torch.zeros(batch, heads, length, 1)
        random_state = torch.zeros(2, dtype=torch.int64)
        ctx.save_for_backward(query, key, value, output, lengths, log_sums, random_state, offset)
        return output.flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, _, _, _, offset = ctx.saved_tensors
        gradient = gradient.reshape(output.shape).unflatten(2, (value.size(2), -1)).sum(3)
        return (
            torch.zeros_like(query),
            torch.zeros_like(key),
            gradient,
            None,
            None if offset is None else torch.zeros_like(offset),
        )


def _copy_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a linear's `forward` that makes its input contiguous first, like the linears of Transformer Engine."""

    def forward_contiguous(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden.contiguous(), *args, **kwargs)

    return forward_contiguous


def _make_normed_linear(linear: Any) -> type:
    """Return a Megatron linear with a norm, which Transformer Engine fuses. Latent attention uses it."""

    class NormedLinear(linear):  # type: ignore[misc]
        def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, config=config, **kwargs)
            self.norm = FusedNorm(config, input_size)

        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(self.norm(hidden), *args, **kwargs)

    return NormedLinear


@contextlib.contextmanager
def _normed_queries(linear: Any, provider: Any) -> Iterator[None]:
    """Add a norm to the linear of an uncompressed query, as Transformer Engine layers have it since 0.19."""
    if not is_installed("0.19"):
        yield
        return
    resolver = load_module("megatron.core.transformer.mla_qk_norm_config").QKNormConfigResolver
    with (
        mock.patch.object(provider, "column_parallel_layer_norm_linear", return_value=_make_normed_linear(linear)),
        # Megatron's local layers also set a norm of the compressed query.
        mock.patch.object(resolver, "_raise_unused_q_norm"),
    ):
        yield


@contextlib.contextmanager
def fused_kernels() -> Iterator[None]:
    """Let Megatron's local layers use the modules above and its grouped experts inside the context."""
    linear = load_module("megatron.core.tensor_parallel.layers").ColumnParallelLinear
    provider = load_module("megatron.core.models.backends").LocalSpecProvider
    # All layers share one tensor of sequence lengths.
    attention = load_module("megatron.core.transformer.spec_utils").ModuleSpec(module=FusedAttention, params={"lengths": {}})
    with (
        grouped_experts(),
        _normed_queries(linear, provider),
        mock.patch.object(provider, "layer_norm", return_value=FusedNorm),
        mock.patch.object(provider, "core_attention", return_value=attention),
        mock.patch.object(linear, "forward", _copy_first(linear.forward)),
    ):
        yield
