"""Running one forward with and without the engine, and comparing every bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fgoffload import Site, TransferPolicy
from fgoffload.engine import CpuDevice, Device, Lane, OffloadEngine

Function = Callable[..., torch.Tensor]


def make_engine(device: Device | None = None, **options: Any) -> OffloadEngine:
    """Return an engine that moves everything, a host budget of 64 MiB, unless `options` say otherwise."""
    options.setdefault("host_budget_bytes", 64 << 20)
    options.setdefault("policy", TransferPolicy(window_bytes=0, prefetch_bytes=1 << 20))
    return OffloadEngine(device=device or CpuDevice(), **options)


class Sites:
    """Wraps functions into regions, one site each, in one lane; without an engine it only calls them."""

    def __init__(self, engine: OffloadEngine | None, *, microbatch: int = 0, has_end_marks: bool = False) -> None:
        self._has_end_marks = has_end_marks
        self.engine = engine
        self.lane = Lane(chunk=0, microbatch=microbatch)
        self._count = 0
        if engine:
            engine.begin_forward(self.lane)

    def __call__(
        self,
        function: Callable[..., Any],
        *inputs: torch.Tensor,
        tag: str = "core_attn",
        is_held: bool = False,
        output: Callable[[Any], torch.Tensor] = lambda result: result,
    ) -> Any:
        self._count += 1
        region = self.engine and self.engine.find_region(Site(chunk=0, layer=self._count, tag=tag), self.lane)
        if not region:
            return function(*inputs)
        region.enter(inputs[0])
        with region.saving():
            result = function(*inputs)
        region.end(output(result) if self._has_end_marks else None, is_held=is_held)
        return result

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self.engine.watch(self.lane) if self.engine else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        with self.engine.follow(self.lane) if self.engine else contextlib.nullcontext():
            yield


def get_gradients(forward: Callable[[Sites], torch.Tensor], leaves: Sequence[torch.Tensor], sites: Sites) -> list[torch.Tensor]:
    """Return the gradients of `leaves` for a fixed, uneven gradient of what `forward` returns."""
    for leaf in leaves:
        leaf.grad = None
    output = forward(sites)
    generator = torch.Generator().manual_seed(7)
    seed = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)
    output.backward(seed)
    return [leaf.grad.clone() for leaf in leaves]


def check_same_bits(
    forward: Callable[[Sites], torch.Tensor], leaves: Sequence[torch.Tensor], engine: OffloadEngine | None = None
) -> OffloadEngine:
    """Check that the gradients of `leaves` are bitwise identical with and without `engine`, and return the engine."""
    engine = engine or make_engine()
    expected = get_gradients(forward, leaves, Sites(None))
    found = get_gradients(forward, leaves, Sites(engine))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return engine


def has_hooks() -> bool:
    """Return whether saved-tensor hooks are installed on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: FBT003 - no public name
