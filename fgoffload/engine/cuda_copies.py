"""Copies queued directly by the CUDA runtime.

[Note: Copies past torch]
`Tensor.copy_` needs several times the CPU time of the runtime call below it: dispatcher, types and
strides, pinned-memory check, and a switch of the current stream. Here all of that is known: contiguous bytes, pinned memory,
our own stream. The engine also does what torch would: it keeps both ends alive until an event after the copy.

PyTorch's stream sanitizer sees copies only in the dispatcher. If it is on, copies go through torch.
"""

import ctypes

import torch

from fgoffload.engine.torch_internals import is_sanitizer_on

_DEFAULT = 4
"""`cudaMemcpyDefault`: the addresses determine the direction."""


class CudaCopies:
    """Queues copies on streams of one device. See [Note: Copies past torch].

    Args:
        runtime: The library that torch uses.
    """

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._copy = runtime.cudaMemcpyAsync
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._copy.restype = ctypes.c_int
        self._addresses: dict[torch.Stream, int] = {}

    def queue(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Queue a copy on `stream`, whichever is current. The host does not block.

        Args:
            destination: Contiguous, of the type and size of `source`; pinned or on the device.
            source: The same.
            stream: Of the device.

        Raises:
            torch.cuda.CudaError: CUDA refuses the copy, or says that something before it failed.
        """
        address = self._addresses.get(stream)
        if address is None:
            address = self._addresses[stream] = _get_address(stream)
        status = self._copy(destination.data_ptr(), source.data_ptr(), destination.nbytes, _DEFAULT, address)
        if status:
            torch.cuda.check_error(status)


def find_cuda_copies() -> CudaCopies | None:
    """Return the copy function, or None if copies must go through torch."""
    if is_sanitizer_on():
        return None
    try:
        return CudaCopies(ctypes.CDLL(None))  # torch has made the symbols of its libraries known to the whole process
    except AttributeError:
        return None  # a torch that was linked with the runtime in it, which then has no name of its own


def _get_address(stream: torch.Stream) -> int:
    """Return the driver's address of `stream`, which torch gives for streams of CUDA's own class."""
    found = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(found.cuda_stream)
