"""A chain of equal layers with known memory: each saves its input and one matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fgoffload.engine import OffloadEngine
from support.sites import Sites


def make_weights(device: str, count: int, *, size: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    """Return `count` weights `[size, size]` with reproducible values."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter((torch.randn(size, size, generator=generator) * size**-0.5).to(device, dtype)) for _ in range(count)
    ]


def run_chain(
    engine: OffloadEngine | None,
    weights: Sequence[torch.nn.Parameter],
    *,
    rows: int | None = None,
    microbatch: int = 0,
    look: Callable[[], None] | None = None,
    keep: bool = False,
) -> None:
    """Run forward and backward, which leaves the gradients in the weights.

    Args:
        engine: None runs without an engine.
        weights: One for each layer.
        rows: Rows of the input; by default those of a weight.
        microbatch: The microbatch of the lane.
        look: Called after the forward of each layer, and when backward has computed the gradient of its output.
        keep: Keep the saved tensors on the GPU, with `OffloadEngine.keep`.
    """
    sites = Sites(engine, microbatch=microbatch)
    size = weights[0].shape[0]
    h = torch.full((rows or size, size), 0.5, device=weights[0].device, dtype=weights[0].dtype)
    for w in weights:
        h = _run_layer(sites, h, w, engine if keep else None)
        if look:
            look()
            h.register_hook(lambda gradient: look())
    loss = h.sum()
    del h
    loss.backward()


def _run_layer(sites: Sites, h: torch.Tensor, w: torch.Tensor, keeper: OffloadEngine | None) -> torch.Tensor:
    def layer(h: torch.Tensor) -> torch.Tensor:
        product = h @ w
        if keeper:
            keeper.keep([h, product])
        return product.sin()

    return sites(layer, h)


def take_gradients(weights: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of `weights` and clear them."""
    gradients = [w.grad for w in weights]
    for w in weights:
        w.grad = None
    return gradients
