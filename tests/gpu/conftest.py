"""Tests that need one CUDA GPU. They skip themselves without one."""

import os

import pytest
import torch

# Before CUDA starts: with workspaces of its own for each stream cuBLAS gives the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# At 1, as Megatron wants it in some cases, all streams share one queue: few overtake another, and who leaves out a wait to see
# that it is missed would not see it.
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def _deterministic():
    from support.hostile import deterministic

    with deterministic():
        yield


@pytest.fixture
def _any_stream_may_accumulate():
    """Parameters of these tests get gradients from several streams, on purpose; torch 2.10 and later warn of it."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda enabled: None)
    warn(enabled=False)
    yield
    warn(enabled=True)
