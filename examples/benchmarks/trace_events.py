"""Reads and classifies the events in a Chrome trace from torch's profiler."""

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""A trace event. `ts` and `dur` are in microseconds, on a clock that host and device share."""


def read_events(path: Path) -> list[Event]:
    """Return the events of a trace that have a duration."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def is_kernel(event: Event) -> bool:
    """Return whether `event` is a kernel. Memory copies and fills are not kernels."""
    return event.get("cat") == "kernel"


def is_copy(event: Event, *, way: str) -> bool:
    """Return whether `event` is a copy between device and host.

    Args:
        event: A trace event.
        way: Direction of the copy, `DtoH` or `HtoD`.
    """
    return event.get("cat") == "gpu_memcpy" and way in event["name"]
