"""Bytes that the host waits for, written by a kernel: around the copy engine, which offload keeps busy."""

import torch


def write_to_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of `tensor` on the host, written by a kernel and not by the copy engine.

    Args:
        tensor: Whole numbers.

    Streams:
        Queued on the current stream. The host does not block: it may read the copy when that stream has come so far.

    Lifetime:
        The caller holds the copy until then.

    Returns:
        Pinned memory, of the same shape and type; None where the device does not see it under its address, or is a CPU.
    """
    if not tensor.is_cuda:
        return None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    if tensor.numel():
        mapped = torch.as_tensor(_MappedMemory(host), device=tensor.device)
        if mapped.data_ptr() != host.data_ptr():
            return None  # pinned for another device: torch has made a copy on this one
        # An op of arithmetic, since torch hands a plain copy to the driver, which may take the copy engine for it.
        torch.add(tensor, 0, out=mapped)
    return host


def read_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` that the host may read now, or `tensor` itself where `write_to_host` makes none.

    Streams:
        The host waits for the current stream, and for no copy that is under way beside it.
    """
    host = write_to_host(tensor)
    if host is None:
        return tensor
    torch.cuda.current_stream().synchronize()
    return host


class _MappedMemory:
    """Pinned host memory under the address at which the device sees it: the same one, by unified addressing."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
