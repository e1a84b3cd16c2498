"""Writes Chrome traces of torch's profiler."""

from collections.abc import Callable
from pathlib import Path

import torch

from fgoffload.output_files import replacing


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
