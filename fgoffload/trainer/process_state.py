"""Process state that a training changes, and restores at its end."""

import contextlib
import os
from collections.abc import Iterator

import torch

from fgoffload import environment

_ATTENTION_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables that Megatron's model sets for Transformer Engine. The next model raises where it finds another backend there."""

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""At 0 Transformer Engine takes attention kernels alone whose backward adds in one order."""


@contextlib.contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Have torch and Transformer Engine choose deterministic kernels, and torch warn where it has none."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Deterministic matrix products need this before CUDA's first one.
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
    """Put the environment variables `names` back when the body ends; none takes those that Megatron's model writes."""
    with environment.keep_environment(names or _ATTENTION_BACKENDS):
        yield
