"""`fgoffload train`: runs a training twice, without and with offload, and compares it bitwise."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.comparison import Comparison, RunRecord
from fgoffload.cli.errors import TRACEBACK_VARIABLE
from fgoffload.cli.launch import Launch, find_launch
from fgoffload.cli.options import check_argument_file, read_count, say_why_no_file
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import ConfigError
from fgoffload.output_files import check_writable

if TYPE_CHECKING:
    from fgoffload.cli.report import Setting

NAME = "train"
SUMMARY = "train twice, without and with offload, and compare every bit"
DESCRIPTION = (
    "Trains the model of a Megatron argument file twice with the same seed, without and with offload. Compares losses and "
    "gradients bitwise, and shows memory and time of both. Runs on a CPU too."
)
USAGE = """\
fgoffload train ARGUMENTS.sh [--steps N] [--data PATH] [--plot FILE]
                       [MEGATRON FLAGS]"""
EXAMPLE = "fgoffload train tiny_moe"
NOTES = f"Any other flag goes to Megatron and overrides the file. {TRACEBACK_VARIABLE}=1 shows the traceback of an error."
EXAMPLE_VALUES: Mapping[str, str] = {"--steps": "10", "--data": "text.txt", "--plot": "memory.png"}
"""A value for each of our own flags, for errors."""
RUNS_A_SCRIPT = False
WITHOUT, WITH = "without offload", "with offload"
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of `fgoffload train`, checked."""

    arguments_file: Path
    megatron_flags: tuple[str, ...]
    """Flags typed on the command line; they override those of the file."""
    steps: int | None
    """Number of steps; None takes `--train-iters`."""
    data: Path | None
    plot: Path | None
    """Path of the plot; None if another process draws it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    # nargs="?", so that our own error reports a missing file.
    parser.add_argument(
        "arguments_file",
        metavar="ARGUMENTS.sh",
        nargs="?",
        help="a Megatron argument file, or a name of `fgoffload plan --list`",
    )
    parser.add_argument("--steps", metavar="N", help="optimizer steps of each training (default: --train-iters)")
    parser.add_argument("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    parser.add_argument(
        "--plot", metavar="FILE", default="memory.png", help="picture of memory over one step (default: memory.png)"
    )


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str], launch: Launch) -> TrainOptions:
    """Return the checked options, without heavy imports.

    Raises:
        ConfigError: An option has a wrong value.
    """
    arguments_file = check_argument_file(
        options.arguments_file, example=EXAMPLE, flags=megatron_flags, own_flags=EXAMPLE_VALUES
    )
    if options.data == "":
        raise ConfigError("--data '' is empty. Give a text file or a folder, or leave --data out.")
    return TrainOptions(
        arguments_file=arguments_file,
        megatron_flags=tuple(megatron_flags),
        steps=None
        if options.steps is None
        else read_count(options.steps, flag="--steps", example=10, hint="; 3 or more to see a step time"),
        data=None if options.data is None else Path(os.path.expanduser(options.data)),
        plot=_check_plot(os.path.expanduser(options.plot)) if launch.is_first else None,
    )


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Train, print the table, write the plot, and return the exit code: 1 if the trainings differ.

    Under `torchrun` all processes train, and the first one shows the results.
    """
    launch = find_launch()
    launch.silence_library()
    with launch.one_voice():
        checked = check_options(options, megatron_flags, launch)
        from fgoffload.integrations.megatron.flags.argument_files import read_argument_file

        file_flags = read_argument_file(checked.arguments_file, variables=os.environ)
    records, setting = _measure(checked, file_flags, launch)
    if checked.plot is None:
        return _find_exit_code(records)
    try:
        _print_results(records, setting)
    finally:
        # Also if the pipe closes early, as with `| head -2`.
        _write_plot(checked.plot, records, setting)
    print(f"Memory over one step: {checked.plot}")
    return _find_exit_code(records)


def _measure(checked: TrainOptions, file_flags: Sequence[str], launch: Launch) -> tuple[dict[str, RunRecord], "Setting"]:
    """Train without and, if the flags say so, with offload. Returns the records by label, and the setting."""
    from fgoffload.cli.progress import show_progress

    with show_progress(is_shown=launch.is_first) as progress:
        with launch.one_voice(), hold_messages():
            # Importing torch and Megatron-Core takes seconds: do it after the checks that need neither.
            from fgoffload.integrations.megatron.patching.imports import require_torch

            require_torch()
            from fgoffload.cli.measurement import (
                TrainingSource,
                describe_setting,
                load_training,
                measure_training,
                process_groups,
            )

            source = TrainingSource(
                arguments_file=str(checked.arguments_file),
                file_flags=file_flags,
                typed_flags=checked.megatron_flags,
                own_flags=tuple(EXAMPLE_VALUES),
                data=checked.data,
                steps=checked.steps,
                world_size=launch.world_size,
            )
            training = load_training(source)
        offload = training.arguments.offload
        records = {}
        with process_groups(training, launch):
            for label, option in ((WITHOUT, None), (WITH, offload))[: 1 if offload is None else 2]:
                on_step = progress.start_run(label, steps=training.steps)
                records[label] = measure_training(training, option, on_step=on_step)
    return records, describe_setting(training)


def _write_plot(path: Path, records: dict[str, RunRecord], setting: "Setting") -> None:
    from fgoffload.cli.report import write_memory_plot

    try:
        write_memory_plot(path, records, setting)
    except OSError as error:
        raise ConfigError(f"--plot {str(path)!r} cannot be written: {error.strerror}. Give another file.") from error


def _print_results(records: dict[str, RunRecord], setting: "Setting") -> None:
    from fgoffload.cli.console import PipeConsole
    from fgoffload.cli.report import build_comparison_table, build_single_table, describe_differences

    console = PipeConsole()
    if WITH not in records:
        console.print(build_single_table(records[WITHOUT], setting))
        print("Trained once, since offload is off. Switch it on with --fine-grained-activation-offloading.")
        return
    comparison = Comparison(without=records[WITHOUT], with_offload=records[WITH])
    console.print(build_comparison_table(comparison, setting))
    for difference in describe_differences(comparison):
        console.print(difference, style="bold red", soft_wrap=True)


def _find_exit_code(records: dict[str, RunRecord]) -> int:
    if WITH not in records:
        return EXIT_EQUAL
    return EXIT_EQUAL if Comparison(without=records[WITHOUT], with_offload=records[WITH]).is_equal else EXIT_DIFFERENT


def _check_plot(name: str) -> Path:
    """Check that the plot can be written before the training starts, and return its path."""
    path = Path(name)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ConfigError(f"--plot {name!r} has an unsupported image format. End it with one of {', '.join(PICTURE_SUFFIXES)}.")
    if os.path.exists(name) and not os.path.isfile(name):
        raise ConfigError(f"--plot {name!r} {say_why_no_file(name)}. Give a file, as in memory.png.")
    if not os.path.isdir(path.absolute().parent):
        raise ConfigError(f"--plot {name!r}: folder {str(path.parent)!r} does not exist. Create it or give another.")
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"--plot {name!r} cannot be written: {error.strerror}. Give a file in a writable folder.") from error
    return path
