"""`fgoffload bench`: benchmarks step time and memory of this package against its alternatives."""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgoffload.benchmark.measurement import FEWEST_REPEATS
from fgoffload.benchmark.settings import (
    BASELINE,
    NAMED_SYSTEMS,
    PROFILE,
    Setting,
    System,
    check_names,
    choose_settings,
    list_default_settings,
    parse_setting,
)
from fgoffload.cli.errors import show_line
from fgoffload.cli.launch import find_launch
from fgoffload.cli.options import check_argument_file, read_count
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.units import SIZE_UNITS, parse_bytes

if TYPE_CHECKING:
    from fgoffload.benchmark.job import Job, Message
    from fgoffload.benchmark.results import Results
    from fgoffload.cli.progress import TrainingProgress

NAME = "bench"
SUMMARY = "measure step time and memory of settings side by side"
DESCRIPTION = (
    "Trains the model of a Megatron argument file for a few steps in each of several settings, and shows step time and memory "
    "side by side: baseline, recompute, this package, and the offload of Megatron-Core, Transformer Engine and PyTorch."
)
USAGE = """\
fgoffload bench ARGUMENTS.sh [--settings NAME ...] [--plans FILE ...]
                       [--budgets SIZE ...] [--profile [FILE]]
                       [--steps N] [--warmup N] [--repeats N]
                       [--baseline-every N] [--check-bits] [--with-optimizer]
                       [--trace] [--out FOLDER] [MEGATRON FLAGS]"""
EXAMPLE = "fgoffload bench tiny_moe"
NOTES = f"""\
settings:
  baseline                      everything stays on the GPU
  recompute:full                full recompute
  recompute:layernorm+moe_act   selective recompute
  ours:core_attn+attn_proj      this package; /full adds full recompute
  megatron:core_attn+attn_proj  Megatron-Core's own offload
  te-layers:2                   Transformer Engine's offload of 2 layers
  save_on_cpu                   PyTorch's
  plan:FILE, budget:SIZE        a plan file; a plan made here
  @0.5 after modules offloads that part of them, ~delay offloads after the next
  CUDA graph, /layernorm adds recompute

Any other flag goes to Megatron and overrides the file. {SIZE_UNITS}"""
EXAMPLE_VALUES: Mapping[str, str] = {
    "--settings": "recompute:full ours:core_attn+attn_proj",
    "--plans": "plan.json",
    "--budgets": "18.9GiB",
    "--profile": "profile.json",
    "--warmup": "3",
    "--repeats": "2",
    "--baseline-every": "1",
    "--out": "bench_w2_moe",
}
OWN_FLAGS = (*EXAMPLE_VALUES, "--steps", "--check-bits", "--with-optimizer", "--trace")
RUNS_A_SCRIPT = False
EXIT_MEASURED, EXIT_MISSED = 0, 1

STEPS, WARMUP, REPEATS, BIT_STEPS = 10, 3, 1, 2
"""Default values of the options. `BIT_STEPS` is the default of `--steps` with `--check-bits`."""

MEASURE_HERE = ""
"""The value of `--profile` without a file."""

WIDTH = 190
"""Table width in characters outside of a terminal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `fgoffload bench`, checked."""

    arguments_file: Path
    megatron_flags: tuple[str, ...]
    """Flags typed on the command line; they override those of the file."""
    settings: tuple[str, ...]
    """Names of settings as typed; empty takes the defaults for the model."""
    plans: tuple[Path, ...]
    budgets_bytes: tuple[int, ...]
    profile: Path | None
    """Path of an existing profile to predict from."""
    measures_profile: bool
    """Whether to measure a profile, after `baseline`."""
    steps: int
    warmup: int
    repeats: int
    baseline_every: int | None
    """Number of settings after which `baseline` is measured again; None for never."""
    compares_bits: bool
    has_optimizer: bool
    writes_traces: bool
    folder: Path
    """Output folder, created once all options are checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    # nargs="?", so that our own error reports a missing file.
    parser.add_argument(
        "arguments_file",
        metavar="ARGUMENTS.sh",
        nargs="?",
        help="a Megatron argument file, or a name of `fgoffload plan --list`",
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("--settings", metavar="NAME", nargs="+", help="settings, or systems (default: chosen for the model)")
    add("--plans", metavar="FILE", nargs="+", help="plan files, each a setting")
    add("--budgets", metavar="SIZE", nargs="+", help="memory budgets to plan for")
    add(
        "--profile",
        metavar="FILE",
        nargs="?",
        const=MEASURE_HERE,
        help="plan and predict from a profile; without FILE it is measured first",
    )
    add("--with-optimizer", action="store_true", help="run the optimizer too")
    add("--check-bits", action="store_true", help="compare losses and gradients instead of times")
    add = parser.add_argument_group("how often").add_argument
    add("--steps", metavar="N", help=f"timed steps of each setting (default: {STEPS}; with --check-bits {BIT_STEPS})")
    add("--warmup", metavar="N", help=f"steps before them (default: {WARMUP}, or until CUDA graphs replay)")
    add("--repeats", metavar="N", help=f"repeats of the whole list (default: {REPEATS})")
    add("--baseline-every", metavar="N", help="measure the baseline again after N settings (default: once a repeat)")
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FOLDER", help="tables, picture, traces and logs (default: bench_NAME)")
    add("--trace", action="store_true", help="write a Chrome trace of one step of each setting")


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> BenchOptions:
    """Return the checked options, without heavy imports.

    Raises:
        ConfigError: An option has a wrong value.
        PlanError: A plan file cannot be read.
    """
    arguments_file = check_argument_file(options.arguments_file, example=EXAMPLE, flags=megatron_flags, own_flags=OWN_FLAGS)
    compares_bits = options.check_bits
    if compares_bits and options.trace:
        raise ConfigError("--check-bits and --trace exclude each other: only timed settings have a trace. Give one of them.")
    if compares_bits and options.profile is not None:
        raise ConfigError("--check-bits and --profile exclude each other: a profile predicts times. Give one of them.")
    counts = {"steps": BIT_STEPS if compares_bits else STEPS, "warmup": WARMUP, "repeats": REPEATS}
    for name, default in counts.items():
        if (text := getattr(options, name)) is not None:
            counts[name] = read_count(text, flag=f"--{name}", example=default)
    if counts["repeats"] >= FEWEST_REPEATS and importlib.util.find_spec("scipy") is None:
        raise ConfigError(
            f"--repeats {counts['repeats']} shows confidence intervals, which need scipy. Install it: pip install scipy, or "
            f"give --repeats {FEWEST_REPEATS - 1}."
        )
    plans = tuple(Path(name) for name in options.plans or ())
    settings = tuple(options.settings or ())
    systems = {system.value for system in NAMED_SYSTEMS}
    named = [parse_setting(word) for word in settings if word not in systems]
    for path in (*plans, *(setting.plan for setting in named if setting.plan is not None)):
        OffloadPlan.load(path)
    return BenchOptions(
        arguments_file=arguments_file,
        megatron_flags=tuple(megatron_flags),
        settings=settings,
        plans=plans,
        budgets_bytes=tuple(parse_bytes(text, name="--budgets", needs_unit=True) for text in options.budgets or ()),
        profile=Path(os.path.expanduser(options.profile)) if options.profile else None,
        measures_profile=options.profile == MEASURE_HERE,
        **counts,
        baseline_every=_read_baseline_every(options),
        compares_bits=compares_bits,
        has_optimizer=options.with_optimizer,
        writes_traces=options.trace,
        folder=Path(os.path.expanduser(options.out or f"bench_{arguments_file.stem}")),
    )


def _read_baseline_every(options: argparse.Namespace) -> int | None:
    if options.baseline_every is None:
        return None
    if options.check_bits:
        raise ConfigError("--check-bits and --baseline-every exclude each other: bits are compared once. Give one of them.")
    return read_count(options.baseline_every, flag="--baseline-every", example=1)


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Measure, print the tables, write the files, and return the exit code.

    The code is 1 if bits differ or were not compared, or if only `baseline` was measured.
    """
    if (launch := find_launch()).world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {launch.world_size}, but bench starts the processes of a training itself. Leave torchrun out."
        )
    checked = check_options(options, megatron_flags)
    from fgoffload.integrations.megatron.flags.argument_files import read_argument_file

    file_flags = read_argument_file(checked.arguments_file, variables=os.environ)
    from fgoffload.cli.progress import show_progress

    with show_progress() as progress:
        results = _measure(checked, file_flags, progress)
    return _show(checked, results)


def _measure(checked: BenchOptions, file_flags: Sequence[str], progress: "TrainingProgress") -> "Results":
    # Importing torch and Megatron-Core takes seconds: do it after the checks that need neither.
    from fgoffload.benchmark.results import Results, collect_results
    from fgoffload.integrations.megatron.patching.imports import require_torch

    require_torch()
    from fgoffload.benchmark.forecaster import Forecaster
    from fgoffload.benchmark.loading import check_plan_files, describe_workload, load_arguments
    from fgoffload.benchmark.rank_models import check_profile
    from fgoffload.planner.timing.profile import Profile

    job = _make_job(checked, file_flags)
    with hold_messages():
        arguments = load_arguments(job)
        job = dataclasses.replace(job, world_size=arguments.world_size, steps_until_replay=arguments.steps_until_replay)
        settings = _choose_settings(checked, arguments.transformer)
        check_plan_files(job, settings)
        profile = None
        if checked.profile is not None:
            profile = Profile.load(checked.profile)
            job = dataclasses.replace(job, profile=checked.profile)
            check_profile(profile, arguments, update=job.update, source=f"--profile {checked.profile}")
    _make_folder(checked.folder)
    results = Results(workload=describe_workload(arguments), about=_describe(checked))
    results.forecaster = None if checked.compares_bits else Forecaster(job, profile=profile)
    collect_results(
        results,
        job,
        settings,
        repeats=checked.repeats,
        baseline_every=checked.baseline_every,
        folder=checked.folder,
        on_message=_show_messages(job, progress),
    )
    return results


def _show_messages(job: "Job", progress: "TrainingProgress") -> "Callable[[Message], None]":
    """Return a function that shows a process's messages as progress."""
    from fgoffload.benchmark.job import Began, Message, Stepped

    on_step: list[Callable[[float], None]] = []

    def on_message(message: Message) -> None:
        if isinstance(message, Began):
            on_step[:] = [progress.start_run(message.run.setting.name, steps=job.steps_of_run)]
        elif isinstance(message, Stepped):
            on_step[0](message.loss)

    return on_message


def _make_job(checked: BenchOptions, file_flags: Sequence[str]) -> "Job":
    from fgoffload.benchmark.job import Job, Purpose
    from fgoffload.trainer.training_policy import Update

    return Job(
        source=str(checked.arguments_file),
        file_flags=tuple(file_flags),
        typed_flags=checked.megatron_flags,
        own_flags=OWN_FLAGS,
        warmup=checked.warmup,
        steps=checked.steps,
        purpose=Purpose.BITS if checked.compares_bits else Purpose.TIMES,
        update=Update.ADAMW if checked.has_optimizer else Update.NONE,
        plan_folder=checked.folder,
        trace_folder=checked.folder if checked.writes_traces else None,
    )


def _choose_settings(checked: BenchOptions, transformer: Mapping[str, Any]) -> tuple[Setting, ...]:
    defaults = list_default_settings(transformer, plans=checked.plans, budgets_bytes=checked.budgets_bytes)
    chosen = defaults
    if checked.settings:
        # Plans and budgets from the command line are always measured.
        given = (setting for setting in defaults if setting.system in (System.PLAN, System.BUDGET))
        chosen = tuple(dict.fromkeys((*choose_settings(checked.settings, defaults), *given)))
    check_names(chosen)
    if not checked.measures_profile:
        return chosen
    # The profile comes first, so that predictions are ready while the rest is measured.
    return (BASELINE, PROFILE, *(setting for setting in chosen if setting != BASELINE))


def _describe(checked: BenchOptions) -> dict[str, Any]:
    """Return the metadata of a benchmark for the JSON file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(checked).items()
            if name != "plans"
        },
        "plans": {path.stem: json.loads(path.read_text(encoding="utf-8-sig")) for path in checked.plans},
    }


def _show(checked: BenchOptions, results: "Results") -> int:
    """Print the tables, write the final files, and return the exit code.

    Raises:
        ConfigError: `baseline` failed, so there is no result.
    """
    from fgoffload.benchmark.frontier import write_frontier_plot
    from fgoffload.benchmark.report import build_bits_table, build_times_table, compare_bits, name_run
    from fgoffload.benchmark.results import PICTURE_NAME
    from fgoffload.cli.console import PipeConsole

    first = results.outcomes[0]
    if results.surroundings is None or (first.setting == BASELINE and first.failure):
        raise ConfigError(f"{checked.arguments_file}: {first.failure}. The output of the training is in {checked.folder}.")
    console = PipeConsole()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if checked.compares_bits:
        rows = compare_bits(results.outcomes)
        console.print(build_bits_table(rows, results.workload, results.surroundings))
        return EXIT_MEASURED if all(row.is_equal for row in rows) else EXIT_MISSED
    summaries, workload = results.summarize(), results.workload
    console.print(build_times_table(summaries, workload, results.surroundings, results.predictions))
    try:
        write_frontier_plot(checked.folder / PICTURE_NAME, summaries, title=name_run(workload, results.surroundings))
    except ImportError as error:  # a GPU machine often lacks matplotlib, and the numbers are complete without it
        show_line(f"warning: {PICTURE_NAME} was not written: {error}. Install matplotlib.")
    print(f"Table, picture and logs: {checked.folder}")
    # A failed setting is a row of the table. If all fail, only `baseline` is left.
    asked = [one for one in results.outcomes if one.setting not in (BASELINE, PROFILE)]
    return EXIT_MISSED if asked and all(one.failure for one in asked) else EXIT_MEASURED


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r} cannot be written to: {error.strerror}. Give a folder that you may write to."
        ) from error
