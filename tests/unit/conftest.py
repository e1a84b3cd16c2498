"""Keeps the tests of this folder on the CPU, even on a machine with a GPU. GPU tests are in `tests/gpu`."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
        yield


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """Whoever collects garbage in a test, as trainers do when they close, need not look through what was there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _the_environment_stays() -> Iterator[None]:
    """Name the file whose tests leave a variable behind, and not the one that trips over it: Megatron's models write some."""
    before = _get_environment()
    yield
    changed = set(before.items()) ^ set(_get_environment().items())
    assert not changed, f"these environment variables are not as they were before the tests of this file: {sorted(changed)}"


_MATTER = ("NVTE_", "NCCL_", "CUDA_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
"""What Megatron, Transformer Engine and process groups read. Torch writes others at will, where its caches are for one."""


def _get_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_MATTER)}
