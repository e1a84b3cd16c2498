"""Writes Chrome traces with torch's profiler."""

from collections.abc import Callable
from pathlib import Path

import torch

from fgoffload.output_files import replacing


def write_trace(run: Callable[[], object], path: Path) -> None:
    """Call `run` under the profiler and write its trace to `path`, compressed if the name ends in `.gz`.

    `run` must synchronize with the device before it returns.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    with replacing(path) as partial:
        profiler.export_chrome_trace(str(partial))
