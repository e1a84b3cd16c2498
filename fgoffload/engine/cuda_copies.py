"""Queues copies directly through the CUDA runtime.

[Note: Copies without torch]
`Tensor.copy_` takes several times the CPU time of its CUDA call, because it also goes through the dispatcher, checks
types, strides and pinning, and switches streams. The engine's copies need none of this: they are contiguous and pinned. Like
torch, the engine keeps source and destination alive until a copy is done. With the CUDA sanitizer on, it uses `copy_`.

[Note: Pieces of a copy]
A GPU has one copy engine per direction. It finishes all copies queued on one stream before it serves another stream. A small
copy on another stream, such as FSDP2's pointers or a dispatcher's token counts, would wait for all copies queued here: 9.5 ms
behind 512 MiB. So we split each copy into pieces, and queue every second piece on a second stream. Other streams are served
between two pieces: after about 0.3 ms with 16 MiB pieces, or 0.4 ms with 32 MiB, at the same bandwidth (H200, PCIe 5).

Larger pieces take less CPU time: 0.09 ms per 512 MiB with 32 MiB pieces, about 0.2 ms with 16 MiB (H200). Copies to the host
have larger pieces, since CPU time matters most in forward. In backward, FSDP2's pointers wait for copies to the device.
"""

import ctypes
import dataclasses

import torch

from fgoffload.engine.torch_internals import is_sanitizer_on
from fgoffload.units import MIB

_DEFAULT = 4
"""`cudaMemcpyDefault`: CUDA infers the direction from the addresses."""

D2H_PIECE_BYTES = 32 * MIB
"""Size of a piece of a copy to the host. See [Note: Pieces of a copy]."""
H2D_PIECE_BYTES = 16 * MIB
"""Size of a piece of a copy to the device. 8 MiB pieces lose 2% of the bandwidth."""


@dataclasses.dataclass(slots=True)
class _Relay:
    """Second stream for every other piece of a stream's copies. See [Note: Pieces of a copy]."""

    first_handle: int
    stream: torch.Stream
    handle: int
    event: torch.Event
    direct_bytes: int = 0
    """Bytes queued on the first stream after the last piece on the second stream."""


class CudaCopies:
    """Queues copies on a device's streams with torch's CUDA runtime library. See [Note: Copies without torch]."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._copy = runtime.cudaMemcpyAsync
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._copy.restype = ctypes.c_int
        self._relays: dict[torch.Stream, _Relay] = {}

    def queue(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream, *, piece_bytes: int) -> None:
        """Queue a copy on `stream` in pieces of `piece_bytes`. The host does not block.

        Both tensors are contiguous and of the same type and size. Each is in pinned memory or on the device.

        Raises:
            torch.cuda.CudaError: CUDA rejects the copy or reports an earlier error.
        """
        relay = self._relays.get(stream)
        if relay is None:
            device = torch.device("cuda", stream.device_index)
            second, event = torch.Stream(device=device), torch.Event(device=device)
            relay = self._relays[stream] = _Relay(_get_handle(stream), second, _get_handle(second), event)
        copy, event = self._copy, relay.event
        target, origin, left_bytes = destination.data_ptr(), source.data_ptr(), destination.nbytes
        while left_bytes > 0:
            size_bytes = min(left_bytes, piece_bytes)
            if relay.direct_bytes < piece_bytes:
                status = copy(target, origin, size_bytes, _DEFAULT, relay.first_handle)
                relay.direct_bytes += size_bytes
            else:
                event.record(stream)
                relay.stream.wait_event(event)
                status = copy(target, origin, size_bytes, _DEFAULT, relay.handle)
                event.record(relay.stream)
                stream.wait_event(event)
                relay.direct_bytes = 0
            if status:
                torch.cuda.check_error(status)
            target, origin, left_bytes = target + size_bytes, origin + size_bytes, left_bytes - size_bytes


def find_cuda_copies() -> CudaCopies | None:
    """Return a `CudaCopies`, or None if the engine must use torch's copies."""
    if is_sanitizer_on():
        return None
    try:
        return CudaCopies(ctypes.CDLL(None))  # torch loads its libraries with global symbols
    except AttributeError:
        return None  # torch links the CUDA runtime statically


def _get_handle(stream: torch.Stream) -> int:
    """Return CUDA's handle for `stream`, which only `torch.cuda.Stream` provides."""
    found = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(found.cuda_stream)
