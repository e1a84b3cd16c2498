"""Measures how far the CPU slows down during copies between host and device, which use the same memory.

    python examples/benchmarks/copies_beside_host.py [--seconds 0.2] [--repeats 4]

The script times two kinds of CPU work without copies, and during continuous copies of 256 MiB: to the host, to the device, and
in both directions. Lookups of objects in random order miss the caches, so other memory traffic slows them down. A view of a
small tensor needs only the caches. A kernel launch lies between these extremes. The CPU only queues the copies in advance, and
the device's copy engines execute them.

Expected output: the time to pin host memory, then a row for each kind of traffic with the median nanoseconds per lookup and per
view, and the GB/s of the copies in each direction.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from fgoffload.engine import Device, find_device
from fgoffload.engine.device import Event
from fgoffload.errors import StateError
from fgoffload.units import GIB, MIB

COPY_BYTES = 256 * MIB
SLABS = 4
OBJECTS = 400_000
"""Number of objects. Their total size of over 40 MB exceeds the private caches of a core."""
LOOKUPS, VIEWS = 60_000, 3_000
"""Lookups and views per measurement. Together they take about ten milliseconds."""
MAX_SECONDS = 1
"""Maximum of `--seconds`. Copies for a longer measurement would fill the driver's queue and block the host."""
TRAFFIC: Sequence[tuple[str, Sequence[bool]]] = (
    ("none", ()),
    ("to the host", (True,)),
    ("to the device", (False,)),
    ("both directions", (True, False)),
)
"""Each kind of traffic has a name and a tuple of directions: True for copies to the host, False for copies to the device."""


class HostWork:
    """Two kinds of CPU work: lookups and views."""

    def __init__(self) -> None:
        self._objects = [(index, float(index)) for index in range(OBJECTS)]
        order = list(range(OBJECTS))
        random.Random(0).shuffle(order)
        self._order = order[:LOOKUPS]
        self._tensor = torch.zeros(8)

    def measure(self) -> tuple[float, float]:
        """Return the seconds per lookup and per view."""
        begin = time.perf_counter()
        total = 0.0
        for index in self._order:
            total += self._objects[index][1]
        between = time.perf_counter()
        for _ in range(VIEWS):
            self._tensor.view(2, 4)
        return (between - begin) / LOOKUPS, (time.perf_counter() - between) / VIEWS


class Copies:
    """Copies between pinned host memory and the device, in either direction."""

    def __init__(self, device: Device) -> None:
        self._device = device
        begin = time.perf_counter()
        self._slabs = [device.allocate_host(COPY_BYTES) for _ in range(SLABS)]
        self.pinning_s_per_gib = (time.perf_counter() - begin) * GIB / (SLABS * COPY_BYTES)
        self._on_device = [device.allocate_device(COPY_BYTES) for _ in range(2)]

    def queue(self, count: int, *, to_host: bool) -> tuple[Event, Event]:
        """Queue `count` copies and return the events before and after them. The host does not wait."""
        device = self._device
        stream = device.d2h_stream if to_host else device.h2d_stream
        start = device.record_event(stream, is_timed=True)
        for number in range(count):
            # Each direction uses half of the slabs, so that the two directions never touch the same bytes.
            on_host = self._slabs[2 * (number % (SLABS // 2)) + to_host].buffer
            on_device = self._on_device[to_host]
            destination, source = (on_host, on_device) if to_host else (on_device, on_host)
            with device.copying_on(stream):
                device.copy_bytes(destination=destination, source=source, stream=stream)
        return start, device.record_event(stream, is_timed=True)

    def close(self) -> None:
        """Release the host memory."""
        for slab in self._slabs:
            slab.close()


def measure_during(
    device: Device, copies: Copies, work: HostWork, directions: Sequence[bool], seconds: float
) -> tuple[float, float, list[float]]:
    """Return the seconds per lookup and per view during copies, and the bytes per second in each direction."""
    # At 60 GB/s, a copy takes 4.5 ms. Queue 1.5 times as many as fit into `seconds`, so that the copies outlast the work.
    count = max(1, round(1.5 * seconds / 4.5e-3))
    events = [device.record_event(device.current_stream())]
    device.synchronize(events[0])
    spans = [copies.queue(count, to_host=to_host) for to_host in directions]
    found = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        found.append(work.measure())
    rates = []
    for start, stop in spans:
        device.synchronize(stop)
        rates.append(count * COPY_BYTES / device.measure_seconds(start, stop))
    lookups, views = zip(*found, strict=True)
    return statistics.median(lookups), statistics.median(views), rates


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="duration of each measurement in seconds")
    parser.add_argument("--repeats", type=int, default=4, help="repeats of each kind of traffic")
    options = parser.parse_args()
    if options.repeats < 1 or not 0 < options.seconds <= MAX_SECONDS:
        parser.error(f"--repeats must be 1 or more, and --seconds above 0 and at most {MAX_SECONDS}.")
    try:
        device = find_device("cuda")
    except StateError as error:
        print(f"This script needs a GPU: {error}", file=sys.stderr)
        return 2
    copies, work = Copies(device), HostWork()
    measured: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name, _ in TRAFFIC}
    for _ in range(options.repeats):  # alternating, since the host's speed varies over time
        for name, directions in TRAFFIC:
            measured[name].append(measure_during(device, copies, work, directions, options.seconds))
    copies.close()
    console = Console()
    console.print(f"pinning host memory: {copies.pinning_s_per_gib:.2f} s per GiB", highlight=False)
    table = Table("copies", "ns per lookup", "ns per view", "GB/s")
    for name, rows in measured.items():
        rates = " ".join(f"{statistics.median(each) / 1e9:.1f}" for each in zip(*(row[2] for row in rows), strict=True))
        cells = (f"{1e9 * statistics.median(row[column] for row in rows):.0f}" for column in (0, 1))
        table.add_row(name, *cells, rates)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
