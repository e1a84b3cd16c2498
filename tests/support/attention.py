"""A small reference attention in plain torch, for cases that Megatron's local layers do not support.

It supports value heads of another size than key heads (MLA), fewer groups of keys than queries, and packed sequences (THD).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fgoffload.integrations.megatron.patching.imports import load_module


class ReferenceAttention(torch.nn.Module):
    """Causal attention, which Megatron builds in place of `DotProductAttention`, with the same arguments."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        channels = config.kv_channels if k_channels is None else k_channels
        self._scale = 1 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self._dropout = torch.nn.Dropout(config.attention_dropout if attention_dropout is None else attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute causal attention.

        Args:
            query: `[s, b, heads, channels]`, or `[s, heads, channels]` for packed sequences.
            key: The same shape, with groups in place of heads.
            value: The shape of `key`, perhaps with other channels.
            attention_mask: Ignored, since attention is causal.
            packed_seq_params: Boundaries of packed sequences.

        Returns:
            `[s, b, heads * channels of value]`, or `[s, heads, channels of value]`.
        """
        is_packed = packed_seq_params is not None
        if is_packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, channels]
        scores = query @ key.transpose(2, 3) * self._scale
        scores = scores.masked_fill(self._find_hidden(query.shape[2], packed_seq_params), float("-inf"))
        attended = self._dropout(scores.softmax(-1)) @ value
        attended = attended.permute(2, 0, 1, 3)  # [s, b, heads, channels]
        return attended.squeeze(1) if is_packed else attended.flatten(2)

    @staticmethod
    def _find_hidden(length: int, packed_seq_params: Any) -> torch.Tensor:
        """Return the mask of hidden keys (the last dimension) of each query: later ones, and those of other sequences."""
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if packed_seq_params is None:
            return later
        sequence = torch.bucketize(torch.arange(length), packed_seq_params.cu_seqlens_q.long(), right=True)
        return later | (sequence[:, None] != sequence[None, :])


@contextlib.contextmanager
def reference_attention() -> Iterator[None]:
    """Let Megatron's local layers use `ReferenceAttention` inside the context."""
    provider = load_module("megatron.core.models.backends").LocalSpecProvider
    with mock.patch.object(provider, "core_attention", return_value=ReferenceAttention):
        yield
