"""Measures what it takes to permute tokens again: rows that are gathered within the device.

The segment in which a recorded step permutes says it only where the device is never idle there. The host waits for the counts
in it, and where it is late the segment is mostly that: of `launch_bound_moe.sh` 0.95 ms on an H100, of which the permutation
has 0.05.
"""

import math

import torch

from fgoffload.engine import Device

_ROW_BYTES = 4096
"""Of a token, about: a gather of such rows takes what their bytes take, whatever the channels."""
_BATCH = 8
"""Gathers in a row, so that launching the first of them, and events, count for little."""
_REPEATS = 3
"""The best counts: what else the machine does can only lower it."""


class TokenGathers:
    """Measured times of token gathers. Each size is measured once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seconds: dict[tuple[int, int], float] = {}

    def measure_seconds(self, given_bytes: int, made_bytes: int) -> float:
        """Return the seconds in which rows of `made_bytes` are gathered of tokens of `given_bytes`.

        Memory for both is taken, and given back. Random states are as they were.

        Streams:
            Gathers on the current one. The host waits for each batch of them.
        """
        size = (given_bytes, made_bytes)
        if size not in self._seconds:
            self._seconds[size] = self._measure(*size)
        return self._seconds[size]

    def _measure(self, given_bytes: int, made_bytes: int) -> float:
        device, place = self._device, self._device.type
        given, made = (max(1, size_bytes // _ROW_BYTES) for size_bytes in (given_bytes, made_bytes))
        tokens = torch.zeros(given, _ROW_BYTES // 2, dtype=torch.bfloat16, device=place)
        rows = torch.empty(made, _ROW_BYTES // 2, dtype=torch.bfloat16, device=place)
        # As by expert: those of one token lie far apart. A generator of its own, since the training goes on with the others'.
        generator = torch.Generator(device=place)
        generator.manual_seed(0)
        indices = torch.randperm(made, generator=generator, device=place) % given
        best_s = math.inf
        for _ in range(1 + _REPEATS):  # the first warms up
            start = device.record_event(device.current_stream(), is_timed=True)
            for _ in range(_BATCH):
                torch.index_select(tokens, 0, indices, out=rows)
            end = device.record_event(device.current_stream(), is_timed=True)
            device.synchronize(end)
            best_s = min(best_s, device.measure_seconds(start, end) / _BATCH)
        return best_s
