"""Random leaf tensors, and a bitwise comparison that includes NaN and signs of zero."""

import contextlib
import gc
from collections.abc import Iterable, Iterator

import torch


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a reproducible random tensor with `requires_grad`."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def get_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(expected: Iterable[torch.Tensor | None], found: Iterable[torch.Tensor | None]) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(get_bits(one), get_bits(other)), f"tensor {index} differs"


@contextlib.contextmanager
def without_the_cyclic_collector() -> Iterator[None]:
    """Disable Python's garbage collector, since device memory must be freed without it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
