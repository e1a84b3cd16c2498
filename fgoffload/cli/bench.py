"""`fgoffload bench`: compares step time and memory of fgoffload and its alternatives."""

import argparse
import dataclasses
import datetime
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgoffload.benchmark.settings import (
    BASELINE,
    Setting,
    System,
    check_names,
    choose_settings,
    list_default_settings,
    parse_setting,
)
from fgoffload.cli.launch import find_launch
from fgoffload.cli.options import add_argument_file, check_argument_file, read_count, read_path, read_size
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import ConfigError
from fgoffload.output_files import check_writable
from fgoffload.plan import OffloadPlan
from fgoffload.units import SIZE_UNITS

if TYPE_CHECKING:
    from fgoffload.benchmark.job import Job, Message
    from fgoffload.benchmark.results import Results
    from fgoffload.cli.progress import StartRun

NAME = "bench"
SUMMARY = "compare step time and memory of several settings"
DESCRIPTION = (
    "Trains the model in a Megatron argument file for a few steps under each setting, and compares step time and memory. The "
    "settings are baseline, recompute, fgoffload, and the offload features of Megatron-Core, Transformer Engine and PyTorch."
)
USAGE = "fgoffload bench ARGUMENTS.sh [OPTIONS] [MEGATRON FLAGS]"
EXAMPLE = "fgoffload bench tiny_moe"
NOTES = f"""\
settings:
  baseline                      everything stays on the GPU
  recompute:full                full recompute
  recompute:layernorm+moe_act   selective recompute
  ours:core_attn+attn_proj      fgoffload; /full adds full recompute
  megatron:core_attn+attn_proj  Megatron-Core's own offload
  te-layers:2                   Transformer Engine's offload of 2 layers
  save_on_cpu                   PyTorch's offload
  plan:FILE, budget:SIZE        a plan file, or a plan made for the budget

After modules, add @0.5 to offload half of their sites, ~delay to start copies after the next CUDA graph launch, or
/layernorm to recompute layer norms.

All other flags are passed to Megatron and override the file. {SIZE_UNITS}"""
EXIT_MEASURED, EXIT_MISSED = 0, 1

STEPS, BIT_STEPS = 10, 2
"""Defaults of `--steps`, without and with `--check-bits`."""

MEASURE_HERE = ""
"""Value of `--profile` when it is given without a file."""

WIDTH = 190
"""Table width in characters if stdout is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    add_argument_file(parser)
    add = parser.add_argument_group("measurements").add_argument
    settings_help = "settings listed below; a prefix alone, such as ours, selects its defaults (default: depends on the model)"
    add("--settings", metavar="NAME", nargs="+", default=(), help=settings_help)
    add("--plans", metavar="FILE", nargs="+", default=(), help="plan files to measure")
    add("--budgets", metavar="SIZE", nargs="+", default=(), type=read_size, help="memory budgets to plan for and measure")
    profile_help = "profile for planning and prediction; without FILE, measure one first"
    add("--profile", metavar="FILE", nargs="?", const=MEASURE_HERE, help=profile_help)
    add("--with-optimizer", action="store_true", help="run the optimizer too")
    add("--check-bits", action="store_true", help="compare losses and gradients bitwise instead of timing steps")
    add = parser.add_argument_group("steps and repeats").add_argument
    steps_help = f"timed steps for each setting (default: {STEPS}; with --check-bits: {BIT_STEPS})"
    add("--steps", metavar="N", type=read_count, help=steps_help)
    warmup_help = "untimed warm-up steps (default: %(default)s; at least until CUDA graphs replay)"
    add("--warmup", metavar="N", type=read_count, default=3, help=warmup_help)
    repeats_help = "number of times to measure all settings (default: %(default)s)"
    add("--repeats", metavar="N", type=read_count, default=1, help=repeats_help)
    baseline_help = "measure the baseline again after every N settings (default: once per repeat)"
    add("--baseline-every", metavar="N", type=read_count, help=baseline_help)
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FOLDER", type=read_path, help="folder for tables, plot, traces and logs (default: bench_NAME)")
    add("--trace", action="store_true", help="write a Chrome trace of one step for each setting")


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> "Job":
    """Check the options without heavy imports, and return the benchmark's job."""
    from fgoffload.benchmark.job import Job
    from fgoffload.integrations.megatron.flags.argument_files import read_argument_file

    path = check_argument_file(options, megatron_flags, example=EXAMPLE)
    for flag in ("trace", "profile", "baseline_every"):
        if options.check_bits and getattr(options, flag) not in (None, False):
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(f"--check-bits does not time steps, so it cannot be combined with {name}. Use only one of them.")
    named = [parse_setting(word) for word in options.settings if word not in [system.value for system in System]]
    for plan in (*options.plans, *(setting.plan for setting in named if setting.plan is not None)):
        OffloadPlan.load(Path(plan))
    folder = options.out or Path(f"bench_{path.stem}")
    measures_profile = options.profile == MEASURE_HERE
    profile = read_path(options.profile) if options.profile else None
    return Job(
        source=str(path),
        file_flags=tuple(read_argument_file(path, variables=os.environ)),
        typed_flags=tuple(megatron_flags),
        own_flags=tuple(options.own_flags),
        warmup=options.warmup,
        steps=options.steps or (BIT_STEPS if options.check_bits else STEPS),
        repeats=options.repeats,
        baseline_every=options.baseline_every,
        compares_bits=options.check_bits,
        has_optimizer=options.with_optimizer,
        folder=folder,
        profile=folder / "profile.json" if measures_profile else profile,
        measures_profile=measures_profile,
        writes_traces=options.trace,
    )


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Measure, print the tables, write the files, and return the exit code.

    The exit code is 1 if results differ or could not be compared, or if every setting except `baseline` failed.
    """
    if (launch := find_launch()).world_size > 1:
        raise ConfigError(f"WORLD_SIZE is {launch.world_size}, but bench starts its own processes. Run it without torchrun.")
    job = check_options(options, megatron_flags)
    from fgoffload.cli.progress import show_progress

    with show_progress() as start_run:
        results = _measure(job, options, start_run)
    return _show(results)


def _measure(job: "Job", options: argparse.Namespace, start_run: "StartRun") -> "Results":
    # Importing torch and Megatron-Core takes seconds, so checks that do not use them have already run.
    from fgoffload.benchmark.results import Results, collect_results
    from fgoffload.integrations.megatron.patching.imports import require_torch

    require_torch()
    from fgoffload.benchmark.loading import check_plan_files, describe_workload, load_arguments
    from fgoffload.benchmark.rank_models import check_profile

    with hold_messages():
        arguments = load_arguments(job)
        job = dataclasses.replace(job, world_size=arguments.world_size, steps_until_replay=arguments.steps_until_replay)
        settings = _choose_settings(options, arguments.transformer)
        check_plan_files(job, settings)
        if not job.measures_profile:
            check_profile(job, arguments)
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        check_writable(job.folder / "run.json")
    except OSError as error:
        raise ConfigError(
            f"--out {str(job.folder)!r} cannot be written to: {error.strerror}. Use a writable folder."
        ) from error
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    results = Results(job=job, workload=describe_workload(arguments), about=about)
    collect_results(results, settings, on_message=_show_messages(job, start_run))
    return results


def _show_messages(job: "Job", start_run: "StartRun") -> "Callable[[Message], None]":
    """Return a function that updates the progress bars from messages of the worker processes."""
    from fgoffload.benchmark.job import Message, Stepped
    from fgoffload.benchmark.measurement import Run

    on_step: list[Callable[[float], None]] = []

    def on_message(message: Message) -> None:
        if isinstance(message, Run):
            on_step[:] = [start_run(message.setting.name, job.steps_of_run)]
        elif isinstance(message, Stepped) and message.loss is not None:
            on_step[0](message.loss)

    return on_message


def _choose_settings(options: argparse.Namespace, transformer: Mapping[str, Any]) -> tuple[Setting, ...]:
    # Measure the plans and budgets from --plans and --budgets even if --settings does not list them.
    given = [Setting(system=System.PLAN, plan=Path(name)) for name in options.plans]
    given += [Setting(system=System.BUDGET, budget_bytes=size_bytes) for size_bytes in options.budgets]
    chosen = choose_settings(options.settings, list_default_settings(transformer), given)
    check_names(chosen)
    return chosen


def _show(results: "Results") -> int:
    """Print the tables, draw the plot, and return the exit code. If `baseline` failed, raise its error instead."""
    from fgoffload.benchmark.frontier import write_frontier_plot
    from fgoffload.benchmark.measurement import summarize
    from fgoffload.benchmark.report import build_bits_table, build_times_table, compare_bits, name_run
    from fgoffload.benchmark.results import PICTURE_NAME
    from fgoffload.cli.console import PipeConsole

    folder, workload, first = results.job.folder, results.workload, results.outcomes[0]
    if results.surroundings is None or (first.setting == BASELINE and first.failure):
        raise ConfigError(f"{results.job.source}: {first.failure}. The output of the run is in {folder}.")
    console = PipeConsole()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if results.job.compares_bits:
        rows = compare_bits(results.outcomes)
        console.print(build_bits_table(rows, workload, results.surroundings))
        return EXIT_MEASURED if all(answer == "yes" for _, answer, _ in rows) else EXIT_MISSED
    summaries = summarize(results.outcomes)
    console.print(build_times_table(summaries, workload, results.surroundings, results.predictions))
    write_frontier_plot(folder / PICTURE_NAME, summaries, title=name_run(workload, results.surroundings))
    print(f"Table, plot and logs: {folder}")
    others = [one for one in results.outcomes if one.setting != BASELINE]
    return EXIT_MISSED if others and all(one.failure for one in others) else EXIT_MEASURED
