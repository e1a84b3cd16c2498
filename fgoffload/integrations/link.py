"""Measures copy rates between a device and its host, and by how much copies slow down matrix products."""

from collections.abc import Sequence

import torch

from fgoffload.engine import Device
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.units import KIB, MIB

SIZES = tuple(size * KIB for size in (64, 256)) + tuple(size * MIB for size in (1, 4, 16, 64, 256))
"""Copy sizes in bytes, from latency-bound to bandwidth-bound."""

QUICK_SIZES = (64 * KIB, 16 * MIB)
"""Copy sizes to measure at the start of training. Copies of 16 MiB are nearly as fast as larger ones and need little memory."""

_BATCH_BYTES = 64 * MIB
"""Bytes to copy per timing, in at most `_MOST_COPIES` copies. The few microseconds of event overhead are then negligible."""
_MOST_COPIES = 256
_REPEATS = 3
"""Number of repeats of each timing. The fastest repeat is used, since other load only lowers the rate."""

_PRODUCT_SIZE = 4096
"""Number of rows and columns of the matrices. On an H100, one bf16 product takes a quarter of a millisecond."""
_PRODUCTS = 40


def measure_link(device: Device, *, sizes: Sequence[int] = SIZES) -> LinkProfile:
    """Measure the copy rates between `device` and its host, for copies of `sizes` bytes in ascending order.

    The device should be idle, since other load lowers the rates.

    Streams:
        Copies run on the device's two copy streams, and products on the current stream. The host waits for all of them.

    Raises:
        StateError: Host memory cannot be allocated.
    """
    buffers = _Buffers(device, max(sizes))
    try:
        copies = tuple(_measure_size(buffers, size_bytes) for size_bytes in sizes)
        return LinkProfile(copies=copies, compute_slowdown=_measure_slowdown(buffers, max(sizes)))
    finally:
        buffers.close()


class _Buffers:
    """One host buffer and one device buffer for each copy direction."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self.device = device
        self._slabs = [device.allocate_host(size_bytes) for _ in range(2)]
        self._on_device = [device.allocate_device(size_bytes) for _ in range(2)]
        for buffer in (*self._on_device, *(slab.buffer for slab in self._slabs)):
            buffer.zero_()  # touches the pages, which the first copy would otherwise allocate
        device.synchronize(device.record_event(device.current_stream()))

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()

    def copy(self, size_bytes: int, *, to_host: bool) -> None:
        """Queue a copy on the stream for its direction."""
        device = self.device
        stream = device.d2h_stream if to_host else device.h2d_stream
        on_host, on_device = self._slabs[to_host].buffer[:size_bytes], self._on_device[to_host][:size_bytes]
        source, destination = (on_device, on_host) if to_host else (on_host, on_device)
        with device.copying_on(stream):
            device.copy_bytes(destination=destination, source=source, stream=stream)

    def time_copies(self, size_bytes: int, count: int, directions: Sequence[bool]) -> float:
        """Run `count` copies in each of `directions` concurrently. Return the seconds that the slower direction takes."""
        device = self.device
        streams = [device.d2h_stream if to_host else device.h2d_stream for to_host in directions]
        starts = [device.record_event(stream, is_timed=True) for stream in streams]
        for _ in range(count):
            for to_host in directions:
                self.copy(size_bytes, to_host=to_host)
        ends = [device.record_event(stream, is_timed=True) for stream in streams]
        for end in ends:
            device.synchronize(end)
        return max(device.measure_seconds(start, end) for start, end in zip(starts, ends, strict=True))


def _measure_size(buffers: _Buffers, size_bytes: int) -> CopyRate:
    count = max(2, min(_MOST_COPIES, _BATCH_BYTES // size_bytes))

    def measure(*directions: bool) -> float:
        buffers.time_copies(size_bytes, 1, directions)  # warms up
        return count * size_bytes / min(buffers.time_copies(size_bytes, count, directions) for _ in range(_REPEATS))

    return CopyRate(
        size_bytes=size_bytes,
        d2h_bytes_per_s=measure(True),  # noqa: FBT003 - a direction
        h2d_bytes_per_s=measure(False),  # noqa: FBT003 - a direction
        duplex_bytes_per_s=measure(True, False),  # noqa: FBT003 - both directions
    )


def _measure_slowdown(buffers: _Buffers, size_bytes: int) -> float:
    """Return the fraction by which concurrent copies in both directions slow down matrix products."""
    device = buffers.device
    if device.has_blocking_copies:
        return 0.0  # copies block: they end before a product begins
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.bfloat16, device=device.type)
    out = torch.empty_like(matrix)

    def time_products() -> float:
        stream = device.current_stream()
        start = device.record_event(stream, is_timed=True)
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=out)
        end = device.record_event(stream, is_timed=True)
        device.synchronize(end)
        return device.measure_seconds(start, end)

    alone_s = min(time_products() for _ in range(1 + _REPEATS))
    copy_s = buffers.time_copies(size_bytes, 2, (True, False)) / 2
    count = 2 + int(2 * alone_s / copy_s)  # enough copies to outlast the products
    beside_s = float("inf")
    for _ in range(_REPEATS):
        for _ in range(count):
            buffers.copy(size_bytes, to_host=True)
            buffers.copy(size_bytes, to_host=False)
        beside_s = min(beside_s, time_products())
        for stream in (device.d2h_stream, device.h2d_stream):
            device.synchronize(device.record_event(stream))
    return max(0.0, beside_s / alone_s - 1)
