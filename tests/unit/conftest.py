"""Tests of this folder run on the CPU, on a machine with a GPU too: those that need one are in `tests/gpu`."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
        yield
