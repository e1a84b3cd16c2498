"""Measures the CPU time of a step for each setting: the time to launch forward and backward, and the waits for the device.

    python examples/benchmarks/host_time.py ARGUMENTS.sh [--settings baseline plan:FILE ...] [--steps 8] [--warmup 3]
        [--out FILE] [Megatron's flags]

In the forward of a model with experts, the host waits for the device in each layer. Between two waits, the host must launch a
layer at least as fast as the device runs one, or the device becomes idle. During backward, the host runs ahead of the device,
so the first wait of the next forward lasts until that backward ends. Waits can therefore be long even if the step is not
launch-bound. The script uses no profiler, since profiling would double the CPU time.

Expected output: a table with the medians of each setting in ms per step: the step time, the CPU time of forward and of backward
without waits, and the waits in each. With `--out`, the script writes the times of every step as JSON.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from one_process import open_runner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.runner import Runner, disable_collector
from fgoffload.benchmark.settings import Setting, parse_setting
from fgoffload.errors import OffloadError
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.trainer.parallel import name_device

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
HEADINGS = ("setting", "step", "forward", "forward waits", "backward", "backward waits")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """Times of one step."""

    step_s: float
    """Seconds until the device finished the step."""
    forward_s: float
    """CPU seconds in all forward passes, without waits."""
    forward_waits_s: float
    """Seconds that the host waited for events in forward passes."""
    backward_s: float
    """CPU seconds in all backward passes, without waits."""
    backward_waits_s: float
    """Seconds that the host waited for events in backward passes."""


class Clock:
    """Sums the wall-clock time of wrapped calls, and of the waits inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = ""

    def wrap(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap `original` so that its time is added to the sum for `name`."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, name
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._add(name, time.perf_counter() - begin)
                self._inside = before

        return call

    def wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the blocking function `original` so that its time counts as waits of the enclosing wrapped call."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(*args, **kwargs)
            self._add(f"{self._inside} waits", time.perf_counter() - begin)
            return result

        return call

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def read(self, step_s: float) -> HostStep:
        """Return the times of a step, given its duration and the sums so far."""
        times = [self.seconds.get(name, 0.0) for name in ("forward", "forward waits", "backward", "backward waits")]
        return HostStep(
            step_s=step_s,
            forward_s=times[0] - times[1],
            forward_waits_s=times[1],
            backward_s=times[2] - times[3],
            backward_waits_s=times[3],
        )


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Yield a clock that times the forward and backward calls of Megatron's schedules in the body."""
    import megatron.core.pipeline_parallel.schedules as schedules

    clock = Clock()
    with Patches() as patches:
        for name, what in (("forward_step", "forward"), ("backward_step", "backward")):
            patches.replace(SCHEDULES, name, clock.wrap(getattr(schedules, name), what))
        # Autograd runs backward on its own thread while the caller blocks, so waits on that thread belong to the caller.
        patches.replace("torch.cuda:Event", "synchronize", clock.wrap_wait(torch.cuda.Event.synchronize))
        yield clock


def measure(runner: Runner, setting: Setting, *, warmup: int, steps: int) -> list[HostStep]:
    """Return the times of each timed step of a setting."""
    found = []
    with runner.train(setting) as trainer, disable_collector():
        for _ in range(warmup):
            trainer.run_step(with_digests=False)
        for _ in range(steps):
            gc.collect()
            with clocked() as clock:
                found.append(clock.read(trainer.run_step(with_digests=False).seconds))
    return found


def build_table(title: str, results: dict[str, list[HostStep]]) -> Table:
    """Return a table with the medians of all settings."""
    table = Table(title=Text(title), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for name, steps in results.items():
        columns = zip(*(dataclasses.astuple(step) for step in steps), strict=True)
        table.add_row(name, *(f"{1e3 * statistics.median(column):.1f}" for column in columns))
    return table


def run_all(options: argparse.Namespace, flags: Sequence[str], console: Console) -> None:
    """Measure all settings and print the table.

    Raises:
        OffloadError: A setting cannot be trained in this process.
    """
    settings = [parse_setting(word) for word in options.settings]
    for setting in settings:
        setting.list_flags()  # raises an error for budgets, since this script makes no plans
    own_flags = ("--settings", "--steps", "--warmup", "--out")
    with open_runner(options.file, flags, own_flags=own_flags, warmup=options.warmup, steps=options.steps) as runner:
        results = {one.name: measure(runner, one, warmup=options.warmup, steps=options.steps) for one in settings}
        title = f"{options.file} on {name_device()}: ms per step"
    console.print(build_table(title, results))
    if options.out is not None:
        document = {name: [dataclasses.asdict(step) for step in steps] for name, steps in results.items()}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", type=Path)
    parser.add_argument("--settings", metavar="NAME", nargs="+", default=["baseline", "ours:expert_fc1"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", metavar="FILE", type=Path)
    options, flags = parser.parse_known_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is below 1.")
    # Megatron's launch scripts set the same value.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    console = Console()
    console.width = max(console.width, 120)
    try:
        run_all(options, flags, console)
    except OffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
