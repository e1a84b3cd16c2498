"""Tests that need one CUDA GPU; elsewhere they are skipped, and say so."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
