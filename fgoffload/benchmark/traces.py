"""Chrome traces of torch's profiler: writing one, and telling its events apart."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fgoffload.output_files import replacing

Event = dict[str, Any]
"""One of a trace. `ts` and `dur` are microseconds, of one clock for host and device."""


def write_trace(run: Callable[[], object], path: Path) -> None:
    """Call `run` under the profiler and write what happened.

    Args:
        run: Returns when the device is done: what comes later is not in the trace.
        path: A name that ends in `.gz` packs it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    with replacing(path) as partial:
        profiler.export_chrome_trace(str(partial))


def read_events(path: Path) -> list[Event]:
    """Return the events of a trace that take time."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def is_kernel(event: Event) -> bool:
    """Return whether `event` is a kernel; copies and fills of memory are none."""
    return event.get("cat") == "kernel"


def is_copy(event: Event, *, way: str) -> bool:
    """Return whether `event` is a copy between device and host.

    Args:
        event: Of a trace.
        way: `DtoH` or `HtoD`.
    """
    return event.get("cat") == "gpu_memcpy" and way in event["name"]
