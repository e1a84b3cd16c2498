"""Copies that are queued by CUDA's runtime itself.

[Note: Copies past torch]
`Tensor.copy_` takes the host several times as long as the runtime's call below it: it goes through the dispatcher, works out
types and strides, asks whose memory it is, and copies on the current stream, which has to be switched around it. Of what moves
here all that is known: contiguous bytes, pinned memory, a stream of our own. What torch would note of the copy, the engine does
itself: both ends live until an event behind it.

PyTorch's stream sanitizer knows copies from the dispatcher alone. Where it is on, copies go through torch.
"""

import ctypes

import torch

from fgoffload.engine.torch_internals import is_sanitizer_on

_DEFAULT = 4
"""`cudaMemcpyDefault`: the addresses tell the direction."""


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
    """Return what queues copies, or None where copies have to go through torch."""
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
