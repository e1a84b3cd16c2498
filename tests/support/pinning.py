"""Checks whether CUDA has pinned host memory."""

import contextlib

import torch


def is_pinned(buffer: torch.Tensor) -> bool:
    """Return whether CUDA has pinned the first page of `buffer`: it rejects pinning a page twice."""
    cudart = torch.cuda.cudart()
    page = buffer.data_ptr() // 4096 * 4096
    if int(cudart.cudaHostRegister(page, 4096, 0)) != 0:
        with contextlib.suppress(RuntimeError):  # clear CUDA's last error, which the next kernel raises
            torch.ones(1, device="cuda")
        return True
    assert int(cudart.cudaHostUnregister(page)) == 0
    return False
