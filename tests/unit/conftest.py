"""Keeps the tests of this folder on the CPU, even on a machine with a GPU. GPU tests are in `tests/gpu`."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _use_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for subprocesses
        yield


@pytest.fixture(autouse=True, scope="module")
def _freeze_existing_objects() -> None:
    """Exclude existing objects from garbage collections, which trainers run when they close."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _check_environment() -> Iterator[None]:
    """Fail the test file that leaves environment variables changed, as Megatron's models do, and not a later file."""
    before = _get_environment()
    yield
    changed = set(before.items()) ^ set(_get_environment().items())
    assert not changed, f"tests of this file changed environment variables: {sorted(changed)}"


_CHECKED_PREFIXES = ("NVTE_", "NCCL_", "CUDA_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
"""Variables that Megatron, Transformer Engine and process groups read. Torch sets others, such as cache paths."""


def _get_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CHECKED_PREFIXES)}
