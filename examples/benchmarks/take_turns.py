"""Compares settings on noisy machines: each setting has its own process, and the processes take turns in rounds.

    python examples/benchmarks/take_turns.py [ARGUMENTS.sh] [--settings ours:expert_fc1 megatron:expert_fc1] [--rounds 15]
        [--warmup 2] [--repeats 6] [--steps-a-round 1] [--energy] [--out FOLDER] [Megatron's flags]

The default is `arguments/launch_bound_moe.sh`. Its launch-bound steps differ by 5 to 10% from one step to the next, and by more
over minutes. `fgoffload bench` runs all steps of one setting before the next setting. In this script, a round runs one step of
each setting, or `--steps-a-round` steps, so that a slow phase of the machine slows all settings. Every other round runs in
reverse order. Each setting is compared with a `baseline` in the same kind of process, since Megatron-Core's engine needs an
environment variable when its process starts. Ratios compare steps of the same round. All processes restart in each repeat,
since their placement on the machine also affects step times. All models must fit on the device at the same time.

A device at its power limit slows down under load. `--energy` measures the energy of each setting through nvidia-ml-py. Combine
it with about `--steps-a-round 6`, since the energy counter updates only a few dozen times per second.

Expected output: a line for each repeat, then a table. For each setting, the table shows the median step time with p20 and p80,
the ratio of its step time to the baseline's, overall and in each repeat, and peak memory. The ratio of a repeat is the median
over its rounds. The overall ratio is the geometric mean over the repeats; three or more repeats also give a 95% interval. With
`--energy`, a second table shows joules per step, their ratio to the baseline, clock, power, and how often the power limit
lowered the clock. `--out` receives the logs of the processes and, after each repeat, `turns.json` with every step and peak.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from energy_meter import Energy, EnergyMeter, Reading
from energy_meter import summarize as summarize_energy
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.job import Job, Workload, make_file_name
from fgoffload.benchmark.measurement import Summary, find_quantiles, find_ratio_interval
from fgoffload.benchmark.report import ABSENT, has_intervals, name_row, name_run, name_versions
from fgoffload.benchmark.settings import BASELINE, ProcessKind, Setting, check_names, parse_setting
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.benchmark.worker import redirect_output
from fgoffload.environment import keep_environment, set_environment
from fgoffload.errors import ConfigError, OffloadError
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[2] / "arguments"
JSON_NAME = "turns.json"
HEADINGS = ("setting", "step ms (p20 p80)", "over baseline", "by repeat", "peak GiB")
INTERVALS = "Over baseline: geometric mean over the repeats, with its 95% interval. By repeat: median over the repeat's rounds."
ENERGY_HEADINGS = ("setting", "J per step", "over baseline", "clock MHz", "power W", "limited by power")
PEAK = "peak"
"""Request that asks a process for its peak bytes over all steps. Any other request is the number of steps to run."""

SILENCE_SECONDS = 300.0
"""Seconds without a message after which a process is considered hung."""


@dataclasses.dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains under one setting."""

    setting: Setting
    kind: ProcessKind

    @property
    def name(self) -> str:
        """Name of the worker's row in the tables."""
        return name_row(self.setting, self.kind)


Steps = dict[Worker, list[float]]
"""Seconds of each worker's steps, in the order of the rounds."""

Readings = dict[Worker, list[Reading]]
"""Each worker's energy readings, one per round; empty without a meter."""

Peaks = dict[Worker, int | None]
"""Peak bytes of each worker in one repeat; None on a CPU."""


def list_workers(settings: Sequence[Setting]) -> list[Worker]:
    """Return a worker for each setting. Before the first setting of each `process`, add a `baseline` worker."""
    workers: dict[Worker, None] = {}
    for setting in settings:
        workers[Worker(BASELINE, setting.process)] = None
        workers[Worker(setting, setting.process)] = None
    return list(workers)


def run_worker(job: Job, setting: Setting, log: Path, connection: Connection) -> None:
    """Build the model of a setting in this process, and run steps on request."""
    redirect_output(log)
    try:
        _serve(job, setting, connection)
    except OffloadError as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 - report any error to the parent process
        traceback.print_exc()
        connection.send(ConfigError(f"{setting.name} ended: {type(error).__name__}: {error}"))
    # Exit immediately, since shutting down torch takes seconds.
    connection.close()
    sys.stdout.flush()
    os._exit(0)


def _serve(job: Job, setting: Setting, connection: Connection) -> None:
    # Imported here, since these modules load Transformer Engine, which reads environment variables at import.
    from fgoffload.benchmark.loading import describe_workload, load_arguments
    from fgoffload.benchmark.runner import Runner, disable_collector, find_peak, reset_peaks
    from fgoffload.benchmark.surroundings import find_surroundings
    from fgoffload.trainer.parallel import initialize_parallel, name_device

    arguments = load_arguments(job)
    if arguments.world_size > 1:
        raise ConfigError(f"{job.source}: the model needs {arguments.world_size} processes. Use smaller parallel sizes.")
    initialize_parallel(arguments)
    runner = Runner(job, on_step=lambda _: None)
    with runner.train(setting) as trainer, disable_collector():
        for _ in range(job.warmup):
            trainer.run_step(with_digests=False)
        reset_peaks()
        connection.send((describe_workload(arguments), find_surroundings(device=name_device())))
        while (count := connection.recv()) != PEAK:
            gc.collect()
            connection.send([trainer.run_step(with_digests=False).seconds for _ in range(count)])
        connection.send(find_peak())


@contextlib.contextmanager
def start(job: Job, workers: Sequence[Worker], folder: Path, *, repeat: int) -> Iterator[dict[Worker, Connection]]:
    """Start a process for each of `workers`, and kill them all after the body. The processes build their models in parallel."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        connections = {}
        for worker in workers:
            own, its = context.Pipe()
            log = folder / f"log_{make_file_name(worker.name)}_{repeat}.txt"
            process = context.Process(target=run_worker, args=(job, worker.setting, log, its), daemon=True)
            with keep_environment(worker.kind.environment):  # the new process inherits this environment
                set_environment(worker.kind.environment)
                process.start()
            its.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections[worker] = own
        yield connections


def receive(worker: Worker, connection: Connection) -> Any:
    """Return the next message of a process.

    Raises:
        OffloadError: The process cannot train its setting, has ended, or sends no message for `SILENCE_SECONDS`.
    """
    if not connection.poll(SILENCE_SECONDS):
        raise ConfigError(f"{worker.name} has sent no message for {SILENCE_SECONDS:.0f} s. See its log.")
    try:
        word = connection.recv()
    except EOFError:
        raise ConfigError(f"{worker.name} has ended. See its log.") from None
    if isinstance(word, OffloadError):
        raise word
    return word


def take_turns(
    connections: Mapping[Worker, Connection], rounds: int, *, steps_a_round: int = 1, meter: EnergyMeter | None = None
) -> tuple[Steps, Readings]:
    """Run `rounds` rounds, every other one in reverse order. Return the seconds of each step, and the energy readings."""
    steps: Steps = {worker: [] for worker in connections}
    readings: Readings = {worker: [] for worker in connections}
    for number in range(rounds):
        order = list(connections) if number % 2 == 0 else list(reversed(connections))
        for worker in order:
            with contextlib.nullcontext() if meter is None else meter.read() as reading:
                connections[worker].send(steps_a_round)
                steps[worker] += receive(worker, connections[worker])
            if reading is not None:
                readings[worker].append(reading)
    return steps, readings


def collect_peaks(connections: Mapping[Worker, Connection]) -> Peaks:
    """Return the peak bytes of each process. The processes then exit."""
    for connection in connections.values():
        connection.send(PEAK)
    return {worker: receive(worker, connection) for worker, connection in connections.items()}


def find_worst(worker: Worker, peaks: Sequence[Peaks]) -> int | None:
    """Return the worker's highest peak over all repeats, in bytes; None on a CPU."""
    return max((one for repeat in peaks if (one := repeat[worker]) is not None), default=None)


def summarize(worker: Worker, repeats: Sequence[Steps]) -> Summary:
    """Summarize one setting, with one ratio to the baseline per repeat: the median over the repeat's rounds."""
    baseline = Worker(BASELINE, worker.kind)
    ratios = [
        statistics.median(own / other for own, other in zip(steps[worker], steps[baseline], strict=True)) for steps in repeats
    ]
    return Summary(
        setting=worker.setting,
        process=worker.kind,
        step_seconds=tuple(seconds for steps in repeats for seconds in steps[worker]),
        ratios=tuple(ratios),
    )


def build_table(repeats: Sequence[Steps], peaks: Sequence[Peaks], workload: Workload, surroundings: Surroundings) -> Table:
    """Return a table with a row for each setting."""
    summaries = {worker: summarize(worker, repeats) for worker in repeats[0]}
    legend = [INTERVALS] if has_intervals(summaries.values()) else []
    table = Table(
        title=Text(f"{name_run(workload, surroundings)}, in alternating rounds"),
        title_justify="left",
        caption=Text("\n".join((name_versions(surroundings), *legend))),
        caption_justify="left",
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for worker, summary in summaries.items():
        low, middle, high = (1e3 * each for each in find_quantiles(summary.step_seconds))
        over, by_repeat = ABSENT, ABSENT
        if worker.setting != BASELINE:
            interval = find_ratio_interval(summary.ratios)
            over = f"{summary.ratio:.3f}" + ("" if interval is None else f" [{interval[0]:.3f} {interval[1]:.3f}]")
            by_repeat = " ".join(f"{ratio:.3f}" for ratio in summary.ratios)
        worst = find_worst(worker, peaks)
        peak = ABSENT if worst is None else f"{worst / GIB:.2f}"
        table.add_row(*map(Text, (worker.name, f"{middle:.1f} ({low:.1f} {high:.1f})", over, by_repeat, peak)))
    return table


def build_energy_table(energies: Mapping[Worker, Energy]) -> Table:
    """Return a table of each worker's energy over all repeats."""
    table = Table(title="energy of the device", title_justify="left")
    for heading in ENERGY_HEADINGS:
        table.add_column(heading, justify="left" if heading == ENERGY_HEADINGS[0] else "right")
    for worker, own in energies.items():
        baseline = energies[Worker(BASELINE, worker.kind)]
        over = ABSENT if worker.setting == BASELINE else f"{own.joules_per_step / baseline.joules_per_step:.3f}"
        cells = (f"{own.joules_per_step:.1f}", over, f"{own.clock_mhz:.0f}", f"{own.watts:.0f}", f"{own.capped_part:.0%}")
        table.add_row(*map(Text, (worker.name, *cells)))
    return table


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own options, and the remaining arguments for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", nargs="?", type=Path, default=ARGUMENTS / "launch_bound_moe.sh")
    parser.add_argument("--settings", metavar="NAME", nargs="+", default=["ours:expert_fc1", "megatron:expert_fc1"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--steps-a-round", type=int, default=1)
    parser.add_argument("--energy", action="store_true", help="measure the device's energy through nvidia-ml-py")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {JSON_NAME} and logs to this folder")
    options, flags = parser.parse_known_args()
    for name in ("rounds", "repeats", "steps_a_round"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is below 1.")
    return options, flags


def run_all(
    options: argparse.Namespace, flags: Sequence[str], folder: Path, console: Console, meter: EnergyMeter | None
) -> None:
    """Measure all settings and print the tables, with energy if there is a meter.

    Raises:
        OffloadError: A setting cannot be trained in a single process.
    """
    settings = [parse_setting(word) for word in options.settings]
    check_names(settings)
    for setting in settings:
        setting.list_flags()  # raises an error for budgets, since this script makes no plans
    job = Job(
        source=str(options.file),
        file_flags=read_argument_file(options.file, variables=os.environ),
        typed_flags=tuple(flags),
        own_flags=("--settings", "--rounds", "--warmup", "--repeats", "--steps-a-round", "--energy", "--out"),
        warmup=options.warmup,
        steps=options.rounds * options.steps_a_round,
        folder=folder,
    )
    workers = list_workers(settings)
    repeats: list[Steps] = []
    all_readings: list[Readings] = []
    peaks: list[Peaks] = []
    for repeat in range(options.repeats):
        with start(job, workers, folder, repeat=repeat) as connections:
            ready = [receive(worker, connection) for worker, connection in connections.items()]
            steps, readings = take_turns(connections, options.rounds, steps_a_round=options.steps_a_round, meter=meter)
            repeats.append(steps)
            all_readings.append(readings)
            peaks.append(collect_peaks(connections))
        workload, surroundings = ready[0]
        medians = ", ".join(f"{worker.name} {1e3 * statistics.median(own):.1f}" for worker, own in repeats[-1].items())
        console.print(f"repeat {repeat + 1}, ms per step: {medians}", highlight=False)
        document = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "surroundings": dataclasses.asdict(surroundings),
            "workload": dataclasses.asdict(workload),
            "repeats": [{worker.name: own for worker, own in steps.items()} for steps in repeats],
            "peak_allocated_bytes": [{worker.name: own for worker, own in repeat.items()} for repeat in peaks],
            "joules": [{worker.name: [one.joules for one in own] for worker, own in repeat.items()} for repeat in all_readings],
        }
        (folder / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(build_table(repeats, peaks, workload, surroundings))
    if meter is not None:
        console.print(build_energy_table(sum_energies(all_readings, repeats)))


def sum_energies(all_readings: Sequence[Readings], repeats: Sequence[Steps]) -> dict[Worker, Energy]:
    """Return the energy of each worker over all repeats."""
    return {
        worker: summarize_energy(
            [reading for readings in all_readings for reading in readings[worker]],
            steps=sum(len(steps[worker]) for steps in repeats),
        )
        for worker in repeats[0]
    }


def main() -> int:
    """Measure, print and write the results."""
    options, flags = parse_options()
    # Megatron's launch scripts set the same value.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    console = Console()
    console.width = max(console.width, 160)
    try:
        with contextlib.ExitStack() as stack:
            folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fgoffload-")))
            folder.mkdir(parents=True, exist_ok=True)
            meter = stack.enter_context(EnergyMeter()) if options.energy else None
            run_all(options, flags, folder, console, meter)
    except OffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
