"""Process state that a training changes, and restores at its end."""

import contextlib
import os
from collections.abc import Iterator

import torch

from fgoffload import environment

_ATTENTION_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables that Megatron's model sets for Transformer Engine. The next model raises if they name another backend."""

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""Variable for attention kernels. At 0, Transformer Engine only uses kernels whose backward adds in a fixed order."""


@contextlib.contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Make torch and Transformer Engine use deterministic kernels. torch warns if it has none for an operator."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Deterministic matrix products need this before the first CUDA matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with keep_environment(_NONDETERMINISTIC):
            os.environ[_NONDETERMINISTIC] = "0"
            yield
    finally:
        torch.use_deterministic_algorithms(mode=was_enabled, warn_only=was_warn_only)


@contextlib.contextmanager
def keep_environment(*names: str) -> Iterator[None]:
    """Restore the environment variables `names` when the body ends. The default is those that Megatron's model sets."""
    with environment.keep_environment(names or _ATTENTION_BACKENDS):
        yield
