"""Tests that need one CUDA GPU. They skip themselves without one."""

import os

import pytest
import torch

# Set before CUDA starts: cuBLAS is deterministic only with separate workspaces per stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# At 1, which Megatron sometimes requires, all streams share one hardware queue, which hides missing waits.
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
    """Disable a warning of torch 2.10 and later: these tests accumulate gradients from several streams on purpose."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda enabled: None)
    warn(enabled=False)
    yield
    warn(enabled=True)
