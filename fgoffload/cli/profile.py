"""`fgoffload profile`: measures the link between GPU and host and, with an argument file, a step of its model."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.errors import TRACEBACK_VARIABLE
from fgoffload.cli.launch import Launch, find_launch
from fgoffload.cli.options import DATA_HELP, add_argument_file, check_argument_file, check_output_file, suggest
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.planner.timing.profile import Profile

NAME = "profile"
SUMMARY = "measure copy rates to the host and a model's step"
DESCRIPTION = (
    "Measures copy rates to and from the host for several sizes: in each direction, in both directions together, and during a "
    "matrix product. With a Megatron argument file, it also measures the time and saved bytes of each module in one step and, "
    "on a GPU, how much copies slow a launch-bound step. Pass the result to `fgoffload plan --profile FILE`."
)
USAGE = "fgoffload profile [ARGUMENTS.sh] [OPTIONS] [MEGATRON FLAGS]"
EXAMPLE = "fgoffload profile tiny_moe"
NOTES = f"All other flags are passed to Megatron and override the file. {TRACEBACK_VARIABLE}=1 shows tracebacks of errors."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    add_argument_file(parser, meaning="a Megatron argument file or a shipped model; omit it to measure only the link")
    parser.add_argument("--json", metavar="FILE", default="profile.json", help="file to write (default: profile.json)")
    parser.add_argument("--data", metavar="PATH", help=DATA_HELP)


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Measure, show the tables, write the file, and return 0. Only rank 0 prints and writes."""
    launch = find_launch()
    with launch.show_errors_once():
        json_file = _check_options(options, megatron_flags)
        from fgoffload.integrations.megatron.patching.imports import require_torch

        require_torch()
    profile = _measure(options, megatron_flags, launch)
    if launch.is_first:
        profile.save(json_file)  # before printing, which raises if the pipe is closed, as with `| head -2`
        _show(profile)
        device = "" if profile.ranks else " --gpu NAME"
        print(f"Profile: {json_file}")
        print(f"To plan with it: fgoffload plan {options.arguments_file or 'MODEL'}{device} --profile {json_file}")
    return 0


def _check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> Path:
    """Check the options without heavy imports, and return the output file."""
    name = options.arguments_file
    if name is None and megatron_flags:
        word = megatron_flags[0]
        hint = suggest(word, options.own_flags)
        raise ConfigError(f"{word!r} needs a model.{hint} Pass an argument file first: {EXAMPLE}.")
    if name is None and options.data is not None:
        raise ConfigError(f"--data {options.data!r} needs a model. Pass an argument file first: {EXAMPLE}.")
    if name is not None:
        name = options.arguments_file = str(check_argument_file(options, megatron_flags, example=EXAMPLE))
    inputs = {"the argument file": name, "the --data file": options.data}
    return check_output_file(options.json, flag="--json", inputs=inputs)


def _measure(options: argparse.Namespace, megatron_flags: Sequence[str], launch: Launch) -> "Profile":
    from fgoffload.trainer.profile_training import profile_link, profile_training

    if options.arguments_file is None:
        return profile_link()
    from fgoffload.cli.measurement import load_training, process_groups
    from fgoffload.planner.timing.profile import MeasuredTraining

    with launch.show_errors_once(), hold_messages():
        training = load_training(
            Path(options.arguments_file),
            megatron_flags,
            own_flags=options.own_flags,
            data=options.data,
            world_size=launch.world_size,
        )
    with process_groups(training.arguments, launch):
        profile = profile_training(training.arguments, training.text)
    measured = MeasuredTraining(source=options.arguments_file, flags=training.flags, world_size=launch.world_size)
    return dataclasses.replace(profile, training=measured)


def _show(profile: "Profile") -> None:
    from fgoffload.cli.console import PipeConsole
    from fgoffload.cli.profile_tables import build_tables, describe_compared_steps, describe_rank
    from fgoffload.planner.profiled_ranks import find_host_slowdown
    from fgoffload.units import format_ms

    console = PipeConsole()
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    console.print(f"{profile.device}, {versions}, {profile.date}", soft_wrap=True)
    for table in build_tables(profile):
        console.print(table)
    for rank in profile.ranks:
        console.print(describe_rank(rank), soft_wrap=True)
    if profile.plain_step_s is not None:
        console.print(f"baseline step without instrumentation: {format_ms(profile.plain_step_s)}", soft_wrap=True)
    slowdown = find_host_slowdown(profile)
    if slowdown is not None:
        console.print(describe_compared_steps(profile, slowdown), soft_wrap=True)
