"""Small forwards with features of real training, which run on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from fgoffload.engine import OffloadEngine
from support.sites import Sites

Forward = Callable[[Sites, torch.Tensor, torch.nn.Parameter], torch.Tensor]


class SavesInEightBits(torch.autograd.Function):
    """Saves its input in fp8, with a scale."""

    @staticmethod
    def forward(ctx, tensor):
        scale = tensor.abs().amax().float() / 448
        ctx.save_for_backward((tensor.float() / scale).to(torch.float8_e4m3fn), scale)
        return tensor * tensor

    @staticmethod
    def backward(ctx, gradient):
        data, scale = ctx.saved_tensors
        return (gradient * 2 * (data.float() * scale)).to(gradient.dtype)


class RaisesInBackward(torch.autograd.Function):
    """Copies its input, and raises in backward."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("the user's own")


def eight_bits(sites: Sites, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    h = sites(lambda h: SavesInEightBits.apply(h @ w), x * 2)
    return sites(lambda h: SavesInEightBits.apply(h.sin()), h)


def under_autocast(sites: Sites, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        h = sites(lambda h: (h @ w).sin(), x * 2)
        h = sites(lambda h: torch.nn.functional.gelu(h @ w) * h, h)
        return sites(lambda h: h.softmax(-1) * h, h)


def around_a_checkpoint(sites: Sites, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    h = sites(lambda h: checkpoint(lambda h: (h @ w).sin().exp(), h, use_reentrant=False), x * 2)
    return sites(lambda h: h.sin(), h)


def inside_a_checkpoint(sites: Sites, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    h = sites(lambda h: h.sin(), x * 2)
    h = checkpoint(lambda h: sites(lambda h: (h @ w).sin().exp(), h), h, use_reentrant=False)
    return sites(lambda h: h.sin(), h)


def plain(sites: Sites, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    h = x * 2
    for _ in range(4):
        h = sites(lambda h: torch.nn.functional.gelu(h @ w) * h.sin(), h) + h
        h = sites(lambda h: h[:, ::4].sin().repeat(1, 4), h, tag="moe_act") + h
    return h


POINTS: dict[str, Forward] = {
    "fp8 tensors": eight_bits,
    "autocast": under_autocast,
    "a checkpoint inside of a region": around_a_checkpoint,
    "a region inside of a checkpoint": inside_a_checkpoint,
    "gathered views and residuals": plain,
}


class Case:
    """One input and one weight on a device."""

    def __init__(self, device_type: str, *, size: int = 256, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, size, generator=generator).to(device_type).requires_grad_()
        self.w = torch.nn.Parameter((torch.randn(size, size, generator=generator) * size**-0.5).to(device_type))

    def run(self, forward: Forward, engine: OffloadEngine | None, *, microbatch: int = 0, backwards: int = 1) -> list:
        """Return the output and the gradients after `backwards` backward passes of one graph."""
        self.clear()
        output = forward(Sites(engine, microbatch=microbatch), self.x, self.w)
        for index in range(backwards):
            output.float().square().sum().backward(retain_graph=index + 1 < backwards)
        return [output.detach(), self.x.grad, self.w.grad]

    def clear(self) -> None:
        self.x.grad = self.w.grad = None


def fail_in_backward(case: Case, engine: OffloadEngine) -> None:
    """Run a forward, and a backward that raises a user's error after two groups."""
    sites = Sites(engine)
    h = sites(lambda h: h.sin() * h, case.x * 2)
    h = RaisesInBackward.apply(h)
    for _ in range(2):
        h = sites(lambda h: h.sin() * h, h)
    h.sum().backward()
