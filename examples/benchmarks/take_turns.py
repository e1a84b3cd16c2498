"""Compares settings on noisy machines: each setting has its own process, and their steps alternate in rounds.

    python examples/benchmarks/take_turns.py [ARGUMENTS.sh] [--settings ours:expert_fc1 megatron:expert_fc1] [--rounds 15]
        [--warmup 2] [--repeats 6] [--steps-a-round 1] [--energy] [--out FOLDER] [Megatron's flags]

The default is `arguments/launch_bound_moe.sh`. Its launch-bound steps differ by 5 to 10% from one step to the next, and by more
over minutes. `fgoffload bench` runs all steps of one setting before the next setting. In this script, a round runs one step of
each setting, or `--steps-a-round` steps, so that a slow phase of the machine slows all settings. Every other round is reversed.
Each setting runs next to a `baseline` in the same kind of process (Megatron-Core's engine needs a variable at start), and its
ratio compares steps of the same round. All processes restart in each repeat, since their placement on the machine also matters.
The device must have room for all models at once.

A device at its power limit slows down under load. `--energy` measures the energy of each setting through nvidia-ml-py. Combine
it with `--steps-a-round 6` or so, since the energy counter updates only a few dozen times per second.

What you should see: a line for each repeat, then a table. For each setting it shows the median step with p20 and p80, the step
time over baseline, the median of each repeat's rounds, and peak memory. With three or more repeats, the step time over baseline
is the geometric mean of these medians with a 95% interval; otherwise it is their median. With `--energy`, a second table shows
joules per step, the ratio to the baseline, clock, power, and how often the power limit lowered the clock. `--out` gets
`turns.json` with every step and the peak of each repeat, updated after each repeat, and the output of the processes.
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
INTERVALS = "Over baseline: geometric mean of the repeats, with its 95% interval. By repeat: median of its rounds."
ENERGY_HEADINGS = ("setting", "J per step", "over baseline", "clock MHz", "power W", "limited by power")
PEAK = "peak"
"""Request to a process for its peak bytes over all steps. Other requests are numbers of steps to run."""

SILENCE_SECONDS = 300.0
"""Seconds without a message after which a process counts as hung."""


@dataclasses.dataclass(frozen=True, slots=True)
class Player:
    """One process: a setting, in one kind of process."""

    setting: Setting
    kind: ProcessKind

    @property
    def name(self) -> str:
        """Name of its row."""
        return name_row(self.setting, self.kind)


Steps = dict[Player, list[float]]
"""Seconds of each step of each player, by round."""

Readings = dict[Player, list[Reading]]
"""Energy readings of each player, by round; empty without a meter."""

Peaks = dict[Player, int | None]
"""Peak bytes of each player in one repeat; None on a device whose allocator does not count."""


def list_players(settings: Sequence[Setting]) -> list[Player]:
    """Return the players: each setting, after `baseline` of its kind of process."""
    players: dict[Player, None] = {}
    for setting in settings:
        players[Player(BASELINE, setting.process)] = None
        players[Player(setting, setting.process)] = None
    return list(players)


def play(job: Job, setting: Setting, log: Path, connection: Connection) -> None:
    """Run one process: build the model of a setting, and run steps on request."""
    redirect_output(log)
    try:
        _play(job, setting, connection)
    except OffloadError as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 - report any error to the waiting process
        traceback.print_exc()
        connection.send(ConfigError(f"{setting.name} ended: {type(error).__name__}: {error}"))
    # End at once: shutting torch down takes seconds, and nobody waits for it.
    connection.close()
    sys.stdout.flush()
    os._exit(0)


def _play(job: Job, setting: Setting, connection: Connection) -> None:
    # Imported here, since it loads torch and Transformer Engine, which reads its switches then.
    from fgoffload.benchmark.loading import describe_workload, load_arguments
    from fgoffload.benchmark.runner import Runner, find_peak, quiet_collector, reset_peaks
    from fgoffload.benchmark.surroundings import find_surroundings
    from fgoffload.trainer.parallel import initialize_parallel, name_device

    arguments = load_arguments(job)
    if arguments.world_size > 1:
        raise ConfigError(f"{job.source}: the model takes {arguments.world_size} processes. Use smaller parallel sizes.")
    initialize_parallel(arguments)
    runner = Runner(job, on_step=lambda _: None)
    with runner.train(setting) as trainer, quiet_collector():
        for _ in range(job.warmup):
            trainer.run_step(with_digests=False)
        reset_peaks()
        connection.send((describe_workload(arguments), find_surroundings(device=name_device())))
        while (count := connection.recv()) != PEAK:
            gc.collect()
            connection.send([trainer.run_step(with_digests=False).seconds for _ in range(count)])
        connection.send(find_peak())


@contextlib.contextmanager
def start(job: Job, players: Sequence[Player], folder: Path, *, repeat: int) -> Iterator[dict[Player, Connection]]:
    """Start a process for each of `players`, and end them after the body. They build their models in parallel."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        connections = {}
        for player in players:
            own, its = context.Pipe()
            log = folder / f"log_{make_file_name(player.name)}_{repeat}.txt"
            process = context.Process(target=play, args=(job, player.setting, log, its), daemon=True)
            with keep_environment(player.kind.environment):  # the process inherits the variables of this one
                set_environment(player.kind.environment)
                process.start()
            its.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections[player] = own
        yield connections


def hear(player: Player, connection: Connection) -> Any:
    """Return the next message of a process.

    Raises:
        OffloadError: The process cannot train its setting, or has ended.
    """
    if not connection.poll(SILENCE_SECONDS):
        raise ConfigError(f"{player.name} has sent no message for {SILENCE_SECONDS:.0f} s. See its log.")
    try:
        word = connection.recv()
    except EOFError:
        raise ConfigError(f"{player.name} has ended. See its log.") from None
    if isinstance(word, OffloadError):
        raise word
    return word


def take_turns(
    connections: Mapping[Player, Connection], rounds: int, *, steps_a_round: int = 1, meter: EnergyMeter | None = None
) -> tuple[Steps, Readings]:
    """Run `rounds` rounds, every other one reversed. Return the seconds of each step, and the energy readings."""
    steps: Steps = {player: [] for player in connections}
    readings: Readings = {player: [] for player in connections}
    for number in range(rounds):
        order = list(connections) if number % 2 == 0 else list(reversed(connections))
        for player in order:
            with contextlib.nullcontext() if meter is None else meter.read() as reading:
                connections[player].send(steps_a_round)
                steps[player] += hear(player, connections[player])
            if reading is not None:
                readings[player].append(reading)
    return steps, readings


def ask_peaks(connections: Mapping[Player, Connection]) -> Peaks:
    """Return the peak bytes of each process. No process runs a step afterwards."""
    for connection in connections.values():
        connection.send(PEAK)
    return {player: hear(player, connection) for player, connection in connections.items()}


def find_worst(player: Player, peaks: Sequence[Peaks]) -> int | None:
    """Return the maximum bytes over all repeats; None where nothing counted them."""
    return max((one for repeat in peaks if (one := repeat[player]) is not None), default=None)


def summarize(player: Player, repeats: Sequence[Steps]) -> Summary:
    """Return the summary of one setting over all repeats. Its ratios are the medians of their rounds."""
    beside = Player(BASELINE, player.kind)
    ratios = [
        statistics.median(own / other for own, other in zip(steps[player], steps[beside], strict=True)) for steps in repeats
    ]
    return Summary(
        setting=player.setting,
        process=player.kind,
        step_seconds=tuple(seconds for steps in repeats for seconds in steps[player]),
        ratios=tuple(ratios),
    )


def build_table(repeats: Sequence[Steps], peaks: Sequence[Peaks], workload: Workload, surroundings: Surroundings) -> Table:
    """Return the table of all settings."""
    summaries = {player: summarize(player, repeats) for player in repeats[0]}
    legend = [INTERVALS] if has_intervals(summaries.values()) else []
    table = Table(
        title=Text(f"{name_run(workload, surroundings)}, in turn"),
        title_justify="left",
        caption=Text("\n".join((name_versions(surroundings), *legend))),
        caption_justify="left",
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for player, summary in summaries.items():
        low, middle, high = (1e3 * each for each in find_quantiles(summary.step_seconds))
        over, by_repeat = ABSENT, ABSENT
        if player.setting != BASELINE:
            interval = find_ratio_interval(summary.ratios)
            over = f"{summary.ratio:.3f}" + ("" if interval is None else f" [{interval[0]:.3f} {interval[1]:.3f}]")
            by_repeat = " ".join(f"{ratio:.3f}" for ratio in summary.ratios)
        worst = find_worst(player, peaks)
        peak = ABSENT if worst is None else f"{worst / GIB:.2f}"
        table.add_row(*map(Text, (player.name, f"{middle:.1f} ({low:.1f} {high:.1f})", over, by_repeat, peak)))
    return table


def build_energy_table(energies: Mapping[Player, Energy]) -> Table:
    """Return the table of each player's energy over all repeats."""
    table = Table(title="energy of the device", title_justify="left")
    for heading in ENERGY_HEADINGS:
        table.add_column(heading, justify="left" if heading == ENERGY_HEADINGS[0] else "right")
    for player, own in energies.items():
        beside = energies[Player(BASELINE, player.kind)]
        over = ABSENT if player.setting == BASELINE else f"{own.joules_a_step / beside.joules_a_step:.3f}"
        cells = (f"{own.joules_a_step:.1f}", over, f"{own.clock_mhz:.0f}", f"{own.watts:.0f}", f"{own.capped_part:.0%}")
        table.add_row(*map(Text, (player.name, *cells)))
    return table


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own options, and the remaining words for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", nargs="?", type=Path, default=ARGUMENTS / "launch_bound_moe.sh")
    parser.add_argument("--settings", metavar="NAME", nargs="+", default=["ours:expert_fc1", "megatron:expert_fc1"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--steps-a-round", type=int, default=1)
    parser.add_argument("--energy", action="store_true", help="measure the device's energy through nvidia-ml-py")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {JSON_NAME} and logs there")
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
        OffloadError: A setting cannot be trained here, in one process.
    """
    settings = [parse_setting(word) for word in options.settings]
    check_names(settings)
    for setting in settings:
        setting.list_flags()  # before a process starts, since this script makes no plans for budgets
    job = Job(
        source=str(options.file),
        file_flags=read_argument_file(options.file, variables=os.environ),
        typed_flags=tuple(flags),
        own_flags=("--settings", "--rounds", "--warmup", "--repeats", "--steps-a-round", "--energy", "--out"),
        warmup=options.warmup,
        steps=options.rounds * options.steps_a_round,
        folder=folder,
    )
    players = list_players(settings)
    repeats: list[Steps] = []
    drawn: list[Readings] = []
    peaks: list[Peaks] = []
    for repeat in range(options.repeats):
        with start(job, players, folder, repeat=repeat) as connections:
            ready = [hear(player, connection) for player, connection in connections.items()]
            steps, readings = take_turns(connections, options.rounds, steps_a_round=options.steps_a_round, meter=meter)
            repeats.append(steps)
            drawn.append(readings)
            peaks.append(ask_peaks(connections))
        workload, surroundings = ready[0]
        medians = ", ".join(f"{player.name} {1e3 * statistics.median(own):.1f}" for player, own in repeats[-1].items())
        console.print(f"repeat {repeat + 1}, ms per step: {medians}", highlight=False)
        document = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "surroundings": dataclasses.asdict(surroundings),
            "workload": dataclasses.asdict(workload),
            "repeats": [{player.name: own for player, own in steps.items()} for steps in repeats],
            "peak_allocated_bytes": [{player.name: own for player, own in repeat.items()} for repeat in peaks],
            "joules": [{player.name: [one.joules for one in own] for player, own in repeat.items()} for repeat in drawn],
        }
        (folder / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(build_table(repeats, peaks, workload, surroundings))
    if meter is not None:
        console.print(build_energy_table(sum_up(drawn, repeats)))


def sum_up(drawn: Sequence[Readings], repeats: Sequence[Steps]) -> dict[Player, Energy]:
    """Return the energy of each player over all repeats."""
    return {
        player: summarize_energy(
            [reading for readings in drawn for reading in readings[player]], steps=sum(len(steps[player]) for steps in repeats)
        )
        for player in repeats[0]
    }


def main() -> int:
    """Measure, print and write the results."""
    options, flags = parse_options()
    # As in Megatron's launch scripts.
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
