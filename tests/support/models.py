"""A small plain PyTorch model, and functions that run it with and without offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fgoffload import TransferConfig

ROWS, WIDTH, LAYERS = 32, 64, 3
ROW_BYTES = ROWS * WIDTH * 4
"""Bytes of one fp32 tensor of hidden states."""

ALL = TransferConfig(min_offloaded_bytes=0, window_bytes=0, prefetch_bytes=1 << 20, host_budget_bytes=64 << 20)
"""Offloads everything immediately."""


class Block(nn.Module):
    """A layer with residuals: attn saves its input and its output; mlp its input and the activation's input and output."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Sequential(nn.Linear(width, width), nn.Softmax(-1))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.norm(hidden))
        return hidden + self.mlp(hidden.sin())


class Net(nn.Module):
    """A few layers, and a loss whose gradients are all different."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean() + hidden.sum(1).sin().sum()


ATTN_BYTES = 2 * ROW_BYTES  # the linear's input, the softmax's output
MLP_BYTES = (1 + 4 + 4) * ROW_BYTES  # the first linear's input, the activation's input, the second linear's input
PATTERNS = {"layers.*.attn": "attn", "layers.*.mlp": "mlp"}


def make_net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def make_inputs(seed: int = 1, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def get_gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of all parameters after `run`, which returns a loss, and its backward."""
    model.zero_grad(set_to_none=True)
    run().backward()
    return copy_gradients(model)


def copy_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check_equal(expected: Iterable[torch.Tensor], found: Iterable[torch.Tensor]) -> None:
    """Check that two lists of tensors are bitwise identical."""
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8))
