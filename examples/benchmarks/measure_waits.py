"""Measures the cost of host waits in Megatron, with and without fgoffload's remedies.

    python examples/benchmarks/measure_waits.py [ARGUMENTS.sh] [--tags core_attn attn_proj] [--steps 10] [--warmup 2]
        [--repeats 2] [--trace FOLDER] [--out FOLDER] [Megatron's flags]

The default `arguments/w2_moe.sh` needs one GPU of 80 GB and Transformer Engine; `arguments/tiny_moe.sh` runs anywhere. One
process trains three settings in order, with a new model each time: "no offload", "before" (offload without remedies) and
"after" (offload as shipped). `--repeats` repeats all three. The remedies are in `host_waits/waits.py` of the Megatron
integration. Some hold offload copies back until a wait is over. Others write the awaited bytes to the host with a kernel
instead of the copy engine. Megatron's flags, such as `--moe-permute-fusion`, follow the file and override it.

Expected output: a line for each run, then a table of step times, peaks and bytes. On a GPU, a second table shows the idle time
of each setting in one step under torch's profiler, and how much of that time occurs at waits of the token dispatchers ([Note:
Idle time] in `idle_time.py`). After each run, the script writes all numbers to `waits.json` in `--out`. It writes the traces of
the profiled steps to `--trace`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import enum
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from idle_time import WAIT_RANGE, IdleTime, find_idle_time
from rich.console import Console
from rich.table import Table
from rich.text import Text
from trace_events import read_events

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import describe_workload, load_arguments
from fgoffload.benchmark.measurement import find_quantiles
from fgoffload.benchmark.report import ABSENT, name_run, name_versions
from fgoffload.benchmark.runner import Runner, disable_collector, reset_peaks
from fgoffload.benchmark.settings import BASELINE, Setting, System
from fgoffload.benchmark.surroundings import find_surroundings
from fgoffload.benchmark.traces import write_trace
from fgoffload.errors import ConfigError, OffloadError
from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.host_waits.waits import HELD_WAITS
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel, name_device
from fgoffload.trainer.trainer import Trainer
from fgoffload.units import format_bytes

ARGUMENTS = Path(__file__).parents[2] / "arguments"
JSON_NAME = "waits.json"
TIME_HEADINGS = ("setting", "step ms (p20 p80)", "overhead in ms, by repeat", "peak allocated", "to host per step")
IDLE_HEADINGS = (
    "one traced step, ms",
    "first to last kernel",
    "kernels",
    "waits",
    "gaps at waits",
    "total",
    "longest",
    "in waits",
    "idle elsewhere",
    "longest gap, and its next kernel",
)


class Remedies(enum.Enum):
    """The three settings. The values are their names in the tables."""

    NO_OFFLOAD = "no offload"
    BEFORE = "before"  # offload without any remedy
    AFTER = "after"  # offload as shipped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of one setting in one repeat."""

    remedies: Remedies
    repeat: int
    """Index of the repeat, starting at 0."""
    step_seconds: tuple[float, ...]
    """Seconds of the timed steps, in order."""
    peak_allocated_bytes: int | None
    """Peak allocated memory; None on a CPU."""
    d2h_bytes: int
    """Bytes offloaded in a step."""
    idle: IdleTime | None = None
    """Idle time of an additional traced step; None if no step was traced or no kernel ran."""

    @property
    def ms(self) -> float:
        """The median step time in milliseconds."""
        return 1e3 * statistics.median(self.step_seconds)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for the JSON file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["remedies"] = self.remedies.value
        if self.idle is not None:
            at_waits = self.idle.at_waits
            fields["idle"] = {
                "span_ms": self.idle.span_ms,
                "busy_ms": self.idle.busy_ms,
                "waits": self.idle.waits,
                "gaps": len(self.idle.gaps),
                "idle_ms": self.idle.idle_ms,
                "gaps_at_waits": len(at_waits),
                "at_waits_ms": sum(gap.span.ms for gap in at_waits),
                "longest_at_waits_ms": max((gap.span.ms for gap in at_waits), default=0.0),
                "in_waits_ms": sum(gap.waiting_ms for gap in self.idle.gaps),
                "elsewhere_ms": self.idle.elsewhere_ms,
                "by_kernel": {
                    kernel: {"gaps": count, "ms": together_ms, "longest_ms": longest_ms}
                    for kernel, (count, together_ms, longest_ms) in self.idle.sum_by_kernel().items()
                },
            }
        return fields


@contextlib.contextmanager
def disable_remedies() -> Iterator[None]:
    """Disable the wait remedies in the body. The library has no option for this, since users do not need one."""
    with Patches() as patches:
        patches.replace("fgoffload.integrations.megatron.host_waits.waits", "wrap_waits", lambda *_: None)
        patches.replace("fgoffload.integrations.megatron.adapter.layers", "has_held_wait", lambda _: False)
        yield


@contextlib.contextmanager
def mark_waits() -> Iterator[None]:
    """Put a profiler range around every method of a token dispatcher in which the host can wait."""
    with Patches() as patches:
        held = [(wait.dispatcher, wait.method) for wait in HELD_WAITS]
        for dispatcher, method in (("MoEAlltoAllTokenDispatcher", "_maybe_dtoh_and_synchronize"), *held):
            wrap_symbol(patches, f"{DISPATCHERS}:{dispatcher}", method, _mark)
        yield


def _mark(original: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.profiler.record_function(WAIT_RANGE):
        return original(*args, **kwargs)


def measure(runner: Runner, job: Job, tags: Sequence[str], remedies: Remedies, *, repeat: int) -> Run:
    """Train one setting and return its result. In the first repeat, also trace a step.

    Raises:
        OffloadError: The setting cannot be trained, or nothing is offloaded.
    """
    setting = BASELINE if remedies is Remedies.NO_OFFLOAD else Setting(system=System.OURS, modules=tuple(tags))
    change = disable_remedies() if remedies is Remedies.BEFORE else contextlib.nullcontext()
    with change, runner.train(setting) as trainer, disable_collector():
        for _ in range(job.warmup):
            time_step(trainer)
        reset_peaks()
        seconds = tuple(time_step(trainer) for _ in range(job.steps))
        peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        d2h_bytes = 0 if trainer.integration is None else trainer.integration.last_step.d2h_bytes
        if trainer.integration is not None and not d2h_bytes:
            raise ConfigError(
                f"--tags {' '.join(tags)} offload nothing in this model. Use other tags, or lower --min-offloaded-tensor-size."
            )
        idle = None
        if repeat == 0 and job.writes_traces:
            idle = trace_step(trainer, job.folder / f"trace_{remedies.name.lower()}.json.gz")
    return Run(
        remedies=remedies, repeat=repeat, step_seconds=seconds, peak_allocated_bytes=peak_bytes, d2h_bytes=d2h_bytes, idle=idle
    )


def time_step(trainer: Trainer) -> float:
    """Run a step and return its seconds, measured with CUDA events on a GPU and with the host's clock otherwise."""
    gc.collect()
    if not torch.cuda.is_available():
        return trainer.run_step(with_digests=False).seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    trainer.run_step(with_digests=False)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def trace_step(trainer: Trainer, path: Path) -> IdleTime | None:
    """Run one more step, write its trace, and return its idle time."""
    gc.collect()
    with mark_waits():
        write_trace(functools.partial(trainer.run_step, with_digests=False), path)
    return find_idle_time(read_events(path))


def warm_profiler() -> None:
    """Load the profiler's libraries, so that the first traced step is not slower than later ones."""
    if torch.cuda.is_available():
        with tempfile.TemporaryDirectory(prefix="fgoffload-") as name:
            write_trace(lambda: torch.ones(1, device="cuda").item(), Path(name) / "trace.json")


def list_time_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return one row of cells per setting, with the columns `TIME_HEADINGS`."""
    plain = {run.repeat: run.ms for run in runs if run.remedies is Remedies.NO_OFFLOAD}
    rows = []
    for remedies in Remedies:
        own = [run for run in runs if run.remedies is remedies]
        low, middle, high = (1e3 * each for each in find_quantiles([step for run in own for step in run.step_seconds]))
        over = ", ".join(f"{run.ms - plain[run.repeat]:+.1f}" for run in own)
        peaks = [run.peak_allocated_bytes for run in own if run.peak_allocated_bytes is not None]
        rows.append(
            (
                remedies.value,
                f"{middle:.1f} ({low:.1f} {high:.1f})",
                ABSENT if remedies is Remedies.NO_OFFLOAD else over,
                format_bytes(max(peaks)) if peaks else ABSENT,
                format_bytes(max(run.d2h_bytes for run in own)),
            )
        )
    return rows


def list_idle_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a row of cells under `IDLE_HEADINGS` for each setting with a traced step."""
    rows = []
    for run in runs:
        if run.idle is None:
            continue
        idle, at_waits, longest = run.idle, [gap.span.ms for gap in run.idle.at_waits], run.idle.longest
        rows.append(
            (
                run.remedies.value,
                f"{idle.span_ms:.1f}",
                f"{idle.busy_ms:.1f}",
                str(idle.waits),
                str(len(at_waits)),
                f"{sum(at_waits):.1f}",
                f"{max(at_waits, default=0.0):.2f}",
                f"{sum(gap.waiting_ms for gap in idle.gaps):.1f}",
                f"{idle.elsewhere_ms:.1f}",
                ABSENT if longest is None else f"{longest.span.ms:.2f}, {longest.kernel.rpartition('::')[2]}",
            )
        )
    return rows


def build_table(title: str, headings: Sequence[str], rows: Sequence[tuple[str, ...]], *, caption: str = "") -> Table:
    """Return a table for the terminal."""
    table = Table(title=Text(title), title_justify="left", caption=Text(caption), caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for cells in rows:
        table.add_row(*map(Text, cells))
    return table


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own options, and the remaining arguments for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", nargs="?", type=Path, default=ARGUMENTS / "w2_moe.sh")
    parser.add_argument("--tags", metavar="TAG", nargs="+", default=["core_attn", "attn_proj"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trace", metavar="FOLDER", type=Path, help="write the traces to this folder")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {JSON_NAME} to this folder")
    options, flags = parser.parse_known_args()
    for name in ("steps", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is below 1.")
    return options, flags


def make_job(options: argparse.Namespace, flags: Sequence[str], folder: Path) -> Job:
    """Return the job that all settings share, with traces in `folder`."""
    return Job(
        source=str(options.file),
        file_flags=read_argument_file(options.file, variables=os.environ),
        typed_flags=tuple(flags),
        own_flags=("--tags", "--steps", "--warmup", "--repeats", "--trace", "--out"),
        warmup=options.warmup,
        steps=options.steps,
        folder=folder,
        writes_traces=True,
    )


def run_all(options: argparse.Namespace, job: Job, console: Console) -> None:
    """Measure all settings and print the tables.

    Raises:
        OffloadError: The model cannot be trained in this process.
    """
    arguments = load_arguments(job)
    if arguments.world_size > 1:
        raise ConfigError(f"{job.source}: the model needs {arguments.world_size} processes. Use smaller parallel sizes.")
    initialize_parallel(arguments)
    try:
        workload, surroundings = describe_workload(arguments), find_surroundings(device=name_device())
        about = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "tags": options.tags,
            "surroundings": dataclasses.asdict(surroundings),
            "workload": dataclasses.asdict(workload),
        }
        runner = Runner(job, on_step=lambda _: None)
        warm_profiler()
        runs: list[Run] = []
        for repeat in range(options.repeats):
            for remedies in Remedies:
                began = time.monotonic()
                run = measure(runner, job, options.tags, remedies, repeat=repeat)
                runs.append(run)
                line = f"{remedies.value}, repeat {repeat + 1}: {run.ms:.1f} ms per step, {time.monotonic() - began:.0f} s"
                console.print(line, highlight=False)
                if options.out is not None:
                    document = {**about, "runs": [run.to_fields() for run in runs]}
                    (options.out / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    finally:
        destroy_parallel()
    title = f"{name_run(workload, surroundings)}, {' '.join(options.tags)}"
    console.print(build_table(title, TIME_HEADINGS, list_time_rows(runs), caption=name_versions(surroundings)))
    if idle := list_idle_rows(runs):
        console.print(build_table("idle time: no kernel on any stream", IDLE_HEADINGS, idle))
    else:
        console.print("The traces contain no kernels, so there is no idle time to report.", highlight=False)


def main() -> int:
    """Measure, print and write the results."""
    options, flags = parse_options()
    # Megatron's launch scripts set the same value. CUDA reads the variable when it initializes.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    console = Console()
    console.width = max(console.width, 160)
    for folder in (options.trace, options.out):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="fgoffload-") as name:
            run_all(options, make_job(options, flags, options.trace or Path(name)), console)
    except OffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
