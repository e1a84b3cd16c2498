"""Small random programs with regions, which run with and without an engine for bitwise comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import gelu

from fgoffload import TransferPolicy
from fgoffload.engine import OffloadEngine
from support.hostile import poison_free_memory
from support.sites import Sites

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sine and cosine": lambda h, w: h.sin() * h.cos(),
    "product": lambda h, w: h @ w,
    "gelu of a product": lambda h, w: gelu(h @ w) * h,
    "product with own transpose": lambda h, w: (h @ h.t()) / h.shape[0] ** 0.5,
    "transpose times itself": lambda h, w: (h.t() @ h) / h.shape[0] ** 0.5,
    "transpose kept": lambda h, w: gelu(h.t()),
    "softmax of a transpose": lambda h, w: h.t().contiguous().softmax(-1) + h,
    "every eighth column": lambda h, w: h[:, ::8].sin().repeat(1, 8),
    "two sparse views": lambda h, w: h[:, ::8].sin().repeat(1, 8) + h[::8].cos().repeat(8, 1),
    "every fourth row": lambda h, w: h[::4].cos().repeat(4, 1),
    "offset view": lambda h, w: torch.cat([h[3:].exp() * h[3:], h[:3].tanh()]),
    "expanded row": lambda h, w: h[3:4].expand_as(h) * h,
    "column": lambda h, w: h[:, 2:3].sin() * h,
    "halves of one storage": lambda h, w: torch.cat([a * b.sin() for a, b in (h.chunk(2, -1), h.chunk(2, -1)[::-1])], -1),
    "bf16 product": lambda h, w: (h.bfloat16() @ w.bfloat16()).to(h.dtype),
    "fp16 product": lambda h, w: (h.half() @ w.half()).to(h.dtype),
    "fp32 norm": lambda h, w: (h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 0.1)).to(h.dtype),
    "chosen by a mask": lambda h, w: torch.where(h > 0, h * 2, h.square()),
    "saved output": lambda h, w: h.exp().tanh(),
}
"""Ops on `h` and `w`, both `[n, n]`, with `h` from -1 to 1. None sums with atomics or indexes with a saved tensor."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One op of a program, inside or outside a region."""

    operation: str
    tag: str | None
    """None if outside all regions."""
    is_held: bool
    flushes: bool
    has_residual: bool
    is_on_side: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A forward of a few parts for each microbatch, and backwards in any order."""

    seed: int
    size: int
    dtype: torch.dtype
    parts: tuple[Part, ...]
    backward_order: tuple[int, ...]
    is_watched: bool
    window_bytes: int
    prefetch_bytes: int

    @property
    def policy(self) -> TransferPolicy:
        return TransferPolicy(window_bytes=self.window_bytes, prefetch_bytes=self.prefetch_bytes)


def draw_program(seed: int, *, sizes: tuple[int, ...] = (256,), has_side: bool = True) -> Program:
    """Return the program of a seed, which is reproducible."""
    rng = random.Random(seed)
    size, dtype = rng.choice(sizes), rng.choice(DTYPES)
    nbytes = size * size * dtype.itemsize
    uses_side = has_side and rng.random() < 0.4

    def draw_part() -> Part:
        return Part(
            operation=rng.choice(list(OPERATIONS)),
            tag=rng.choice(["attn_norm", "core_attn", "moe_act", "expert_fc1"]) if rng.random() < 0.85 else None,
            is_held=rng.random() < 0.2,
            flushes=rng.random() < 0.3,
            has_residual=rng.random() < 0.5,
            is_on_side=uses_side and rng.random() < 0.5,
        )

    microbatches = rng.randint(1, 4)
    return Program(
        seed=seed,
        size=size,
        dtype=dtype,
        parts=tuple(draw_part() for _ in range(rng.randint(3, 8))),
        backward_order=tuple(rng.sample(range(microbatches), microbatches)),
        is_watched=rng.random() < 0.5,
        window_bytes=rng.choice([0, 2 * nbytes, 6 * nbytes, 1 << 30]),
        prefetch_bytes=rng.choice([0, 2 * nbytes, 6 * nbytes, 1 << 30]),
    )


def no_op() -> None:
    """Return immediately."""


class Runner:
    """Runs programs on one device.

    Args:
        device: `cpu` or `cuda`.
        poison_count: The number of freed tensors to poison after each part.
    """

    def __init__(self, device: str, *, poison_count: int = 4) -> None:
        self._device = device
        self._poison_count = poison_count
        self._pause: Callable[[], None] = no_op
        self._main = torch.cuda.current_stream() if device == "cuda" else None
        self._side = torch.cuda.Stream() if device == "cuda" else None

    def run(self, program: Program, engine: OffloadEngine | None, *, pause: Callable[[], None] = no_op) -> list[torch.Tensor]:
        """Return the outputs of all microbatches and the gradients of all leaves.

        Args:
            program: The program.
            engine: None runs without an engine.
            pause: Called before each part and each backward, to delay compute.
        """
        self._pause = pause
        self._poison(program, count=16 * self._poison_count)
        generator = torch.Generator().manual_seed(program.seed)

        def make(scale: float) -> torch.Tensor:
            values = torch.randn(program.size, program.size, generator=generator) * scale
            return values.to(self._device, program.dtype)

        weights = [torch.nn.Parameter(make(program.size**-0.5)) for _ in range(2)]
        inputs = [make(0.5).requires_grad_() for _ in program.backward_order]
        seed = make(0.1)
        outputs = [
            self._forward(program, Sites(engine, microbatch=index), x, weights, engine) for index, x in enumerate(inputs)
        ]
        found = [output.detach().clone() for output in outputs]
        for index in program.backward_order:
            self._pause()
            outputs[index].backward(seed)
            outputs[index] = None
            self._poison(program)
        return [*found, *(leaf.grad for leaf in (*weights, *inputs) if leaf.grad is not None)]

    def _forward(
        self, program: Program, sites: Sites, x: torch.Tensor, weights: list[torch.Tensor], engine: OffloadEngine | None
    ) -> torch.Tensor:
        h = x * 0.9
        stream = self._main
        with sites.watched() if program.is_watched else contextlib.nullcontext():
            for index, part in enumerate(program.parts):
                h, stream = self._hop(h, stream, self._side if part.is_on_side else self._main)
                with self._on(stream):
                    self._pause()
                    h = self._run_part(part, sites, h, weights[index % 2])
                    if engine and part.flushes:
                        engine.flush()
                    self._poison(program)
        return self._hop(h, stream, self._main)[0]

    def _run_part(self, part: Part, sites: Sites, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        operation = OPERATIONS[part.operation]

        def function(h: torch.Tensor) -> torch.Tensor:
            return operation(h, w).sin()

        new = function(h) if part.tag is None else sites(function, h, tag=part.tag, is_held=part.is_held)
        return (new + h) * 0.5 if part.has_residual else new

    def _hop(self, h: torch.Tensor, old, new) -> tuple[torch.Tensor, object]:
        """Return a copy of `h` that is allocated on the stream `new`."""
        if old == new:
            return h, new
        new.wait_stream(old)
        with self._on(new):
            moved = h.clone()
        old.wait_stream(new)  # `old` may reuse the memory of h, but only after the clone
        return moved, new

    @contextlib.contextmanager
    def _on(self, stream) -> Iterator[None]:
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            yield

    def _poison(self, program: Program, *, count: int | None = None) -> None:
        numel = program.size * program.size
        poison_free_memory(self._device, (2 * numel, 4 * numel), count=self._poison_count if count is None else count)


def are_bitwise_identical(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Return whether all tensors are bitwise identical."""
    pairs = zip(expected, found, strict=True)
    return all(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) for one, other in pairs)


def check_can_reveal_faults(results: list[torch.Tensor]) -> None:
    """Check that results can reveal a fault: NaN would look like poison, and zeros would hide errors."""
    for result in results:
        assert result.isfinite().all()
        assert result.any()
