"""Small random models and training runs for Hypothesis, with unusual uses of autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE = 8
NBYTES = SIZE * SIZE * 4


class ReturnsSaved(torch.autograd.Function):
    """Returns its saved tensors as gradients, whatever the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one, other)
        return (one * other).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = ctx.saved_tensors
        return other, one


class WritesSaved(torch.autograd.Function):
    """Saves its gradient and multiplies it in place in backward, like fused losses."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h.detach().cos())
        return h.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        with torch.no_grad():
            return saved.mul_(gradient)


class WritesInput(torch.autograd.Function):
    """Overwrites its input with its gradient, without a version bump, and saves that."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        out = h.detach().sin()
        h.detach().numpy()[...] = h.detach().cos().numpy()
        ctx.save_for_backward(h.detach())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * gradient


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        out = h.exp()
        out.mark = "kept"
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * gradient


def _bounded(h: torch.Tensor) -> torch.Tensor:
    return h.tanh()


def _in_place(function: Callable[[torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    def run(part: Part, h: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        function(h)
        return h

    return run


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda part, h, other: functional.linear(h, part.weight, part.bias),
    "sine": lambda part, h, other: h.sin(),
    "product": lambda part, h, other: h * other,
    "square": lambda part, h, other: h @ h.t() / SIZE,
    "norm": lambda part, h, other: functional.layer_norm(h, (SIZE,), part.bias, part.weight[0]),
    "batch norm": lambda part, h, other: functional.batch_norm(h, part.mean, part.variance, training=True),
    "dropout": lambda part, h, other: functional.dropout(h, 0.5),
    "rrelu": lambda part, h, other: functional.rrelu(h, training=True),
    "softmax": lambda part, h, other: h.softmax(-1),
    "buffer": lambda part, h, other: h * part.buffer,
    "expand": lambda part, h, other: h * other[:1].expand(SIZE, SIZE),
    "pieces": lambda part, h, other: torch.cat([piece.sin() for piece in h.chunk(2)]),
    "unsafe pieces": lambda part, h, other: torch.cat([piece.cos() for piece in torch.unsafe_chunk(h * 1, 2)]),
    "transposed": lambda part, h, other: (h.t() * other).t(),
    "strided": lambda part, h, other: h + h[:, ::2].exp().repeat(1, 2),
    "relu in place": _in_place(torch.relu_),
    "scaled in place": _in_place(lambda h: h.mul_(0.5)),
    "row in place": _in_place(lambda h: h[1:2].add_(1)),
    "fresh in place": lambda part, h, other: (h * 1).sigmoid_().mul_(other),
    "detached": lambda part, h, other: h + other.detach().exp(),
    "log": lambda part, h, other: part.log(h.exp(), h),
    "returns saved": lambda part, h, other: h + ReturnsSaved.apply(part.weight, part.buffer),
    "returns saved twice": lambda part, h, other: h + ReturnsSaved.apply(part.weight, h.detach()),
    "returns both": lambda part, h, other: h + ReturnsSaved.apply(part.weight, part.other),
    "writes saved": lambda part, h, other: WritesSaved.apply(h),
    "writes input": lambda part, h, other: part.write_input(h * 1),
    "saves output": lambda part, h, other: SavesItsOutput.apply(_bounded(h)),
    "func grad": lambda part, h, other: h + torch.func.grad(lambda v: v.sin().sum())(h.detach()),
    "func vmap": lambda part, h, other: torch.func.vmap(torch.sin)(h),
    "func jvp": lambda part, h, other: torch.func.jvp(torch.sin, (h,), (other.detach(),))[1],
    "checkpoint": lambda part, h, other: checkpoint(lambda h: h.sin().exp(), h, use_reentrant=False),
    "reentrant": lambda part, h, other: checkpoint(lambda h: h.cos().exp(), h, use_reentrant=True),
    "no grad": lambda part, h, other: h + part.without_grad(h),
}


@dataclasses.dataclass(frozen=True)
class Step:
    op: str
    source: int
    """The index of the input among the results so far, counted from the last."""
    other: int


class Part(nn.Module):
    """A module of steps, each of which uses results of earlier steps."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 3)
        self.other = nn.Parameter(torch.randn(SIZE, SIZE) / 3)
        self.bias = nn.Parameter(torch.randn(SIZE) / 3)
        self.register_buffer("buffer", torch.randn(SIZE, SIZE))
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("variance", torch.ones(SIZE))

    def log(self, found: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        found.detach().clamp_(max=1)  # as for a log, not in the loss
        return h

    def write_input(self, h: torch.Tensor) -> torch.Tensor:
        h.cosh().sin()  # saves `h`, which is overwritten next
        return WritesInput.apply(h)

    @torch.no_grad()
    def without_grad(self, h: torch.Tensor) -> torch.Tensor:
        return functional.linear(h, self.weight).sin()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        results = [h]
        for step in self.steps:
            source, other = (results[-1 - index % len(results)] for index in (step.source, step.other))
            results.append(OPS[step.op](self, source, other))
        return _bounded(results[-1])


@dataclasses.dataclass(frozen=True)
class Training:
    parts: list[list[Step]]
    """The steps of each part, in order. Every second part is inside another module."""
    patterns: list[str]
    """Module patterns. Without any, a block around the forward saves on the host."""
    window_bytes: int
    prefetch_bytes: int
    host_budget_bytes: int
    group_bytes: int
    keeps_every: int
    """A filter keeps every n-th tensor. 0 is no filter."""
    microbatches: int
    is_backward_late: bool
    """Run all backwards after all forwards, in order."""
    retains_graph: bool


def make_model(training: Training) -> nn.Module:
    torch.manual_seed(0)
    parts = [Part(steps) for steps in training.parts]
    return nn.Sequential(*(nn.Sequential(part) if index % 2 else part for index, part in enumerate(parts)))


def trainings() -> st.SearchStrategy[Training]:
    step = st.builds(Step, op=st.sampled_from(sorted(OPS)), source=st.integers(0, 2), other=st.integers(0, 3))
    sizes = st.sampled_from([0, NBYTES, 3 * NBYTES, 1 << 24])
    return st.builds(
        Training,
        parts=st.lists(st.lists(step, min_size=1, max_size=5), min_size=1, max_size=4),
        patterns=st.sampled_from([[], ["*"], ["0"], ["**"], ["1.0", "0"], ["1", "1.0"]]),
        window_bytes=sizes,
        prefetch_bytes=sizes,
        host_budget_bytes=st.sampled_from([NBYTES, 8 * NBYTES, 1 << 24]),
        group_bytes=st.sampled_from([1, 2 * NBYTES, 1 << 20]),
        keeps_every=st.sampled_from([0, 0, 2, 3]),
        microbatches=st.integers(1, 3),
        is_backward_late=st.booleans(),
        retains_graph=st.booleans(),
    )
