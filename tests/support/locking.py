"""Checks whether CUDA has pinned host memory."""

import contextlib

import torch


def is_locked(buffer: torch.Tensor) -> bool:
    """Return whether CUDA has locked the first page of `buffer`: a second lock of the same page is refused."""
    cudart = torch.cuda.cudart()
    page = buffer.data_ptr() // 4096 * 4096
    if int(cudart.cudaHostRegister(page, 4096, 0)) != 0:
        with contextlib.suppress(RuntimeError):  # the refusal is CUDA's last error now, and the next kernel would raise it
            torch.ones(1, device="cuda")
        return True
    assert int(cudart.cudaHostUnregister(page)) == 0
    return False
