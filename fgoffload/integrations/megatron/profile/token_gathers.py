"""Measures the time of recomputing a token permutation, by gathering rows within the device.

A recorded step shows this time only if the device is never idle in the segment of the permutation. The host waits for the token
counts there, and if it is late, most of the segment is idle time. In `launch_bound_moe.sh` on an H100 the segment takes 0.95
ms, of which the permutation takes 0.05.
"""

import math

import torch

from fgoffload.engine import Device

_ROW_BYTES = 4096
"""Approximate bytes of a token. The time of a gather of such rows depends on their bytes, not on their channels."""
_BATCH = 8
"""Consecutive gathers per measurement, so that events and the first launch add little."""
_REPEATS = 3
"""Measurements of a size, of which the fastest counts. Other load on the machine can only slow a gather down."""


def measure_gather_s(device: Device, given_bytes: int, made_bytes: int) -> float:
    """Return the seconds of gathering rows of `made_bytes` from tokens of `given_bytes`.

    Allocates memory for both and frees it. Random states do not change.

    Streams:
        Gathers on the current stream. The host waits for each batch of them.
    """
    given, made = (max(1, size_bytes // _ROW_BYTES) for size_bytes in (given_bytes, made_bytes))
    tokens = torch.zeros(given, _ROW_BYTES // 2, dtype=torch.bfloat16, device=device.type)
    rows = torch.empty(made, _ROW_BYTES // 2, dtype=torch.bfloat16, device=device.type)
    # Sorted by expert, rows of one token lie far apart. Uses its own generator to leave those of the training alone.
    generator = torch.Generator(device=device.type)
    generator.manual_seed(0)
    indices = torch.randperm(made, generator=generator, device=device.type) % given
    best_s = math.inf
    for _ in range(1 + _REPEATS):  # the first warms up
        start = device.record_event(device.current_stream(), is_timed=True)
        for _ in range(_BATCH):
            torch.index_select(tokens, 0, indices, out=rows)
        end = device.record_event(device.current_stream(), is_timed=True)
        device.synchronize(end)
        best_s = min(best_s, device.measure_seconds(start, end) / _BATCH)
    return best_s
