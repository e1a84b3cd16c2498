"""Measures copies between host and GPU, and tries to pin host memory. The only file here that uses a GPU."""

import dataclasses
import time

from fgoffload.errors import OffloadError
from fgoffload.units import MIB

COPY_BYTES = 256 * MIB
"""Bytes of a copy. It takes 5 ms at 50 GB/s, so its start-up time is negligible."""
REPEATS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Copy rates in bytes per second. Each is the best of several copies, since other load only lowers the rate."""

    d2h: float
    h2d: float


def measure_copies(index: int) -> CopyRates:
    """Return the copy rates between pinned memory and GPU `index`."""
    import torch

    device = torch.device("cuda", index)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def measure(destination: torch.Tensor, source: torch.Tensor) -> float:
        best_seconds = float("inf")
        for _ in range(REPEATS + 1):  # the first copy warms up
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            destination.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best_seconds = min(best_seconds, time.perf_counter() - start)
        return COPY_BYTES / best_seconds

    return CopyRates(d2h=measure(on_host, on_device), h2d=measure(on_device, on_host))


def try_pinning() -> str | None:
    """Pin and release `COPY_BYTES` of host memory as the engine does; return the error, or None."""
    from fgoffload.engine import find_device

    try:
        slab = find_device("cuda").allocate_host(COPY_BYTES)
    except OffloadError as error:
        return str(error)
    slab.close()
    return None
