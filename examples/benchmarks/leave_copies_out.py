"""Separates the cost of copies from the other costs of offload, by running the same steps with and without copies.

    python examples/benchmarks/leave_copies_out.py ARGUMENTS.sh [--settings ours:expert_fc1 plan:FILE ...] [--rounds 12]
        [--warmup 2] [--out FILE] [Megatron's flags]

Each setting has one model. Each round runs one step of each kind: with all copies, without copies to the host, without any
copies, and without offload but with the plan's recompute. Every other round runs in reverse order. The steps without copies
have the same offload groups, events, waits and memory. Their gradients are garbage, but no optimizer uses them.

Expected output: a row for each kind of step of each setting. It shows the median step time, and the ratio to the step without
offload in the same round, with a 95% interval. The ratio of "no copies" shows the CPU overhead of offload. Copies cause the
rest: compute waits for them, and they share memory bandwidth with the CPU. `--out` writes all step times to a JSON file.
"""

import argparse
import contextlib
import enum
import gc
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from one_process import open_runner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.measurement import find_ratio_interval
from fgoffload.benchmark.runner import Runner, disable_collector
from fgoffload.benchmark.settings import Setting, System, parse_setting
from fgoffload.engine import Region
from fgoffload.errors import ConfigError, OffloadError
from fgoffload.integrations.megatron import MegatronOffload
from fgoffload.integrations.megatron.patching.methods import set_attribute
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.trainer.parallel import name_device

HEADINGS = ("setting", "step", "ms", "ratio to no offload")
OUR_SYSTEMS = (System.OURS, System.PLAN)


class Kind(enum.Enum):
    """Kinds of steps, by the copies that they omit."""

    ALL = "all copies"
    NO_D2H = "no copies to the host"
    NO_COPIES = "no copies"
    NO_OFFLOAD = "no offload"


class Omission:
    """Holds the current kind of step, which determines the copies to omit."""

    def __init__(self) -> None:
        self.kind = Kind.ALL


@contextlib.contextmanager
def omitting(integration: MegatronOffload) -> Iterator[Omission]:
    """In the body, omit the copies of `integration` that the yielded object specifies."""
    omission, device = Omission(), integration.engine.device
    copy_bytes, find_region = device.copy_bytes, integration.find_region

    def copy(*, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        is_omitted = omission.kind is Kind.NO_COPIES or (omission.kind is Kind.NO_D2H and stream is device.d2h_stream)
        if not is_omitted:
            copy_bytes(destination=destination, source=source, stream=stream)

    def find(tag: str) -> Region | None:
        return None if omission.kind is Kind.NO_OFFLOAD else find_region(tag)

    with Patches() as patches:
        set_attribute(patches, device, "copy_bytes", copy)
        set_attribute(patches, integration, "find_region", find)
        yield omission


def measure(runner: Runner, setting: Setting, *, warmup: int, rounds: int) -> dict[Kind, list[float]]:
    """Return the seconds of each step of a setting in the order of the rounds, keyed by the kind of step."""
    found: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    with runner.train(setting) as trainer, disable_collector(), omitting(trainer.integration) as omission:
        for number in range(warmup + rounds):
            for kind in reversed(Kind) if number % 2 else Kind:
                omission.kind = kind
                gc.collect()
                seconds = trainer.run_step(with_digests=False).seconds
                if number >= warmup:
                    found[kind].append(seconds)
    return found


def build_table(title: str, results: dict[str, dict[Kind, list[float]]]) -> Table:
    """Return a table with the median of each setting and kind of step."""
    table = Table(title=Text(title), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right")
    for name, steps in results.items():
        for kind, seconds in steps.items():
            ratios = [one / base for one, base in zip(seconds, steps[Kind.NO_OFFLOAD], strict=True)]
            shown = "" if kind is Kind.NO_OFFLOAD else describe_ratios(ratios)
            table.add_row(name if kind is Kind.ALL else "", kind.value, f"{1e3 * statistics.median(seconds):.1f}", shown)
    return table


def describe_ratios(ratios: Sequence[float]) -> str:
    """Return the geometric mean of `ratios`, with its 95% interval if there are enough ratios."""
    interval = find_ratio_interval(ratios)
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} [{interval[0]:.3f} {interval[1]:.3f}]"


def run_all(options: argparse.Namespace, flags: Sequence[str], console: Console) -> None:
    """Measure all settings and print the table.

    Raises:
        OffloadError: A setting cannot be trained in this process, or offloads nothing.
    """
    settings = [parse_setting(word) for word in options.settings]
    for setting in settings:
        if setting.system not in OUR_SYSTEMS:
            raise ConfigError(
                f"{setting.name} does not use fgoffload's engine. Use settings such as ours:expert_fc1 or plan:FILE."
            )
    own_flags = ("--settings", "--rounds", "--warmup", "--out")
    with open_runner(options.file, flags, own_flags=own_flags, warmup=options.warmup, steps=options.rounds) as runner:
        results = {one.name: measure(runner, one, warmup=options.warmup, rounds=options.rounds) for one in settings}
        title = f"{options.file} on {name_device()}: {options.rounds} rounds"
    console.print(build_table(title, results))
    if options.out is not None:
        document = {name: {kind.value: seconds for kind, seconds in steps.items()} for name, steps in results.items()}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", type=Path)
    parser.add_argument("--settings", metavar="NAME", nargs="+", default=["ours:expert_fc1"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", metavar="FILE", type=Path)
    options, flags = parser.parse_known_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} is below 1.")
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
