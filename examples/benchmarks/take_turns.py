"""What settings cost where a machine's own noise is larger: each is a process, and they run one step after the other in turn.

    python examples/benchmarks/take_turns.py [ARGUMENTS.sh] [--settings ours:expert_fc1 megatron:expert_fc1] [--rounds 15]
        [--warmup 2] [--repeats 6] [--out FOLDER] [Megatron's flags]

By default `arguments/launch_bound_moe.sh`, whose steps are as long as the host takes to launch them: there a step differs
from the next by 5 to 10%, and by more from one minute to the next. `fgoffload bench` runs all steps of a setting before those
of the next; here a round is one step of each, a second or two together, so that what makes the machine slower makes all of them
slower. Every other round goes backwards. Each setting has a `nothing` of its own kind of process beside it (Megatron-Core's
engine wants a variable set at start), and its ratio is that of the two steps in one round. In each repeat all processes start
anew, for where a system puts a process is luck too. All models are on the device at once: it has to have room for them.

What you should see: a line for each repeat, then a table: of each setting the median step with p20 and p80, the step time over
nothing with an interval of 95% over the repeats, each the median of its rounds, those medians, and the most that tensors took.
`--out` has every step, and the most of each repeat, as `turns.json`, up to date after each, and what the processes printed.
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

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.job import Job, make_file_name
from fgoffload.benchmark.measurement import Summary, find_quantiles
from fgoffload.benchmark.report import ABSENT, Workload, name_row, name_run, name_versions
from fgoffload.benchmark.settings import NOTHING, ProcessKind, Setting, check_names, parse_setting
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.benchmark.worker import redirect_output
from fgoffload.environment import keep_environment, set_environment
from fgoffload.errors import ConfigError, OffloadError
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[2] / "arguments"
JSON_NAME = "turns.json"
HEADINGS = ("setting", "step ms (p20 p80)", "over nothing", "by repeat", "peak GiB")
STEP, PEAK = "step", "peak"
"""What a process is asked for: to run one, and how many bytes tensors took at most in all steps that it was asked for."""

SILENCE_SECONDS = 300.0
"""After so long without a word a process is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Player:
    """One process: a setting, in one kind of process."""

    setting: Setting
    kind: ProcessKind

    @property
    def name(self) -> str:
        """What its row is called."""
        return name_row(self.setting, self.kind)


Steps = dict[Player, list[float]]
"""Seconds of each step, by round."""

Peaks = dict[Player, int | None]
"""Bytes of one repeat; None on a device whose allocator does not count."""


def list_players(settings: Sequence[Setting]) -> list[Player]:
    """Return who takes turns: `nothing` of each kind of process before the first setting of that kind."""
    players: dict[Player, None] = {}
    for setting in settings:
        players[Player(NOTHING, setting.process)] = None
        players[Player(setting, setting.process)] = None
    return list(players)


def play(job: Job, setting: Setting, log: Path, connection: Connection) -> None:
    """Build the model of a setting, and run a step whenever somebody asks for one: what each process does."""
    redirect_output(log)
    try:
        _play(job, setting, connection)
    except OffloadError as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits is told
        traceback.print_exc()
        connection.send(ConfigError(f"{setting.name} ended: {type(error).__name__}: {error}"))
    # At once: taking torch down takes seconds, and nobody waits for it.
    connection.close()
    sys.stdout.flush()
    os._exit(0)


def _play(job: Job, setting: Setting, connection: Connection) -> None:
    # Here, since it loads torch, and Transformer Engine behind it, which reads its switches then.
    from fgoffload.benchmark.loading import describe_workload, load_arguments
    from fgoffload.benchmark.runner import Runner, find_peak, quiet_collector, reset_peaks
    from fgoffload.benchmark.surroundings import find_surroundings
    from fgoffload.integrations.megatron.parallel import initialize_parallel, name_device
    from fgoffload.integrations.megatron.training_policy import Kernels

    arguments = load_arguments(job)
    if arguments.world_size > 1:
        raise ConfigError(f"{job.source}: the model takes {arguments.world_size} processes. Give smaller parallel sizes.")
    initialize_parallel(arguments)
    runner = Runner(job, on_step=lambda _: None)
    with runner.train(setting, Kernels.FASTEST, job.update) as trainer, quiet_collector():
        for _ in range(job.warmup):
            trainer.run_step(with_digests=False)
        reset_peaks()
        connection.send((describe_workload(arguments), find_surroundings(device=name_device())))
        while connection.recv() == STEP:
            gc.collect()
            connection.send(trainer.run_step(with_digests=False).seconds)
        connection.send(find_peak())


@contextlib.contextmanager
def start(job: Job, players: Sequence[Player], folder: Path, *, repeat: int) -> Iterator[dict[Player, Connection]]:
    """Hold a process for each of `players`; they build their models side by side."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        connections = {}
        for player in players:
            own, its = context.Pipe()
            log = folder / f"log_{make_file_name(player.name)}_{repeat}.txt"
            process = context.Process(target=play, args=(job, player.setting, log, its), daemon=True)
            with keep_environment(player.kind.environment):  # it has the variables of this process
                set_environment(player.kind.environment)
                process.start()
            its.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections[player] = own
        yield connections


def hear(player: Player, connection: Connection) -> Any:
    """Return what a process says next.

    Raises:
        OffloadError: It cannot train its setting, or is gone.
    """
    if not connection.poll(SILENCE_SECONDS):
        raise ConfigError(f"{player.name} has said nothing for {SILENCE_SECONDS:.0f} s. Look into its log.")
    try:
        word = connection.recv()
    except EOFError:
        raise ConfigError(f"{player.name} has ended. Look into its log.") from None
    if isinstance(word, OffloadError):
        raise word
    return word


def take_turns(connections: Mapping[Player, Connection], rounds: int) -> Steps:
    """Return the seconds of each step: of `rounds` rounds, every other one backwards."""
    steps: Steps = {player: [] for player in connections}
    for number in range(rounds):
        order = list(connections) if number % 2 == 0 else list(reversed(connections))
        for player in order:
            connections[player].send(STEP)
            steps[player].append(hear(player, connections[player]))
    return steps


def ask_peaks(connections: Mapping[Player, Connection]) -> Peaks:
    """Return the bytes that each took at peak; none of them runs a step any more."""
    for connection in connections.values():
        connection.send(PEAK)
    return {player: hear(player, connection) for player, connection in connections.items()}


def find_worst(player: Player, peaks: Sequence[Peaks]) -> int | None:
    """Return the most bytes of any repeat; None where nothing counted them."""
    return max((one for repeat in peaks if (one := repeat[player]) is not None), default=None)


def summarize(player: Player, repeats: Sequence[Steps]) -> Summary:
    """Return what all repeats say of one setting: its ratios are the medians of their rounds."""
    beside = Player(NOTHING, player.kind)
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
    table = Table(
        title=Text(f"{name_run(workload, surroundings)}, in turn"),
        title_justify="left",
        caption=Text(name_versions(surroundings)),
        caption_justify="left",
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for player in repeats[0]:
        summary = summarize(player, repeats)
        low, middle, high = (1e3 * each for each in find_quantiles(summary.step_seconds))
        over, by_repeat = ABSENT, ABSENT
        if player.setting != NOTHING:
            interval = summary.find_interval()
            over = f"{summary.ratio:.3f}" + ("" if interval is None else f" [{interval[0]:.3f} {interval[1]:.3f}]")
            by_repeat = " ".join(f"{ratio:.3f}" for ratio in summary.ratios)
        worst = find_worst(player, peaks)
        peak = ABSENT if worst is None else f"{worst / GIB:.2f}"
        table.add_row(*map(Text, (player.name, f"{middle:.1f} ({low:.1f} {high:.1f})", over, by_repeat, peak)))
    return table


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own options, and what is left for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", metavar="ARGUMENTS.sh", nargs="?", type=Path, default=ARGUMENTS / "launch_bound_moe.sh")
    parser.add_argument("--settings", metavar="NAME", nargs="+", default=["ours:expert_fc1", "megatron:expert_fc1"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {JSON_NAME} and logs there")
    options, flags = parser.parse_known_args()
    for name in ("rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is below 1.")
    return options, flags


def run_all(options: argparse.Namespace, flags: Sequence[str], folder: Path, console: Console) -> None:
    """Measure all settings and show them.

    Raises:
        OffloadError: A setting cannot be trained here, in one process.
    """
    settings = [parse_setting(word) for word in options.settings]
    check_names(settings)
    job = Job(
        source=str(options.file),
        file_flags=read_argument_file(options.file, variables=os.environ),
        typed_flags=tuple(flags),
        own_flags=("--settings", "--rounds", "--warmup", "--repeats", "--out"),
        warmup=options.warmup,
        steps=options.rounds,
        plan_folder=folder,
    )
    players = list_players(settings)
    repeats: list[Steps] = []
    peaks: list[Peaks] = []
    for repeat in range(options.repeats):
        with start(job, players, folder, repeat=repeat) as connections:
            ready = [hear(player, connection) for player, connection in connections.items()]
            repeats.append(take_turns(connections, options.rounds))
            peaks.append(ask_peaks(connections))
        workload, surroundings = ready[0]
        medians = ", ".join(f"{player.name} {1e3 * statistics.median(own):.1f}" for player, own in repeats[-1].items())
        console.print(f"repeat {repeat + 1}, ms a step: {medians}", highlight=False)
        document = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "surroundings": dataclasses.asdict(surroundings),
            "workload": dataclasses.asdict(workload),
            "repeats": [{player.name: own for player, own in steps.items()} for steps in repeats],
            "peak_allocated_bytes": [{player.name: own for player, own in repeat.items()} for repeat in peaks],
        }
        (folder / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(build_table(repeats, peaks, workload, surroundings))


def main() -> int:
    """Measure, show and write."""
    options, flags = parse_options()
    # As launch scripts of Megatron have it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    console = Console()
    console.width = max(console.width, 160)
    try:
        with contextlib.ExitStack() as stack:
            folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fgoffload-")))
            folder.mkdir(parents=True, exist_ok=True)
            run_all(options, flags, folder, console)
    except OffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
