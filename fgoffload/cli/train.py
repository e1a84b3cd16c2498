"""`fgoffload train`: trains a model twice, with and without offload, and compares the results bitwise."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.errors import TRACEBACK_VARIABLE
from fgoffload.cli.launch import Launch, find_launch
from fgoffload.cli.options import DATA_HELP, add_argument_file, check_argument_file, check_output_file, read_count
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fgoffload.cli.comparison import RunRecord
    from fgoffload.trainer.steps import Difference

NAME = "train"
SUMMARY = "train twice, with and without offload, and compare bitwise"
DESCRIPTION = (
    "Trains the model in a Megatron argument file twice with the same seed, with and without offload. Compares losses and "
    "gradients bitwise, and shows memory and step time of both runs. Also runs on a CPU."
)
USAGE = "fgoffload train ARGUMENTS.sh [OPTIONS] [MEGATRON FLAGS]"
EXAMPLE = "fgoffload train tiny_moe"
NOTES = f"All other flags are passed to Megatron and override the file. {TRACEBACK_VARIABLE}=1 shows tracebacks of errors."
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    add_argument_file(parser)
    parser.add_argument("--steps", metavar="N", type=read_count, help="optimizer steps per run (default: --train-iters)")
    parser.add_argument("--data", metavar="PATH", help=DATA_HELP)
    plot_help = "plot of memory over one step (default: memory.png)"
    parser.add_argument("--plot", metavar="FILE", default="memory.png", help=plot_help)


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Train, print the table, write the plot, and return 1 if the runs differ, otherwise 0. Only rank 0 shows results."""
    launch = find_launch()
    with launch.show_errors_once():
        path = check_argument_file(options, megatron_flags, example=EXAMPLE)
        if options.data == "":
            raise ConfigError("--data '' is empty. Use a text file or a folder, or omit --data.")
        if launch.is_first:
            options.plot = check_output_file(options.plot, flag="--plot", inputs={"the argument file": path})
    records, title = _measure(path, options, megatron_flags, launch)
    from fgoffload.cli.report import WITH, WITHOUT, build_table, write_memory_plot
    from fgoffload.trainer.steps import find_differences

    differences = find_differences(records[WITHOUT].steps, records[WITH].steps) if WITH in records else {}
    if launch.is_first:
        try:
            _print_results(build_table(records, differences, title), differences, is_on=WITH in records)
        finally:  # even if the pipe is closed early, as with `| head -2`
            write_memory_plot(options.plot, records, title)
        print(f"Memory over one step: {options.plot}")
    return EXIT_DIFFERENT if differences else EXIT_EQUAL


def _print_results(table: "Table", differences: "Mapping[str, Difference]", *, is_on: bool) -> None:
    from fgoffload.cli.console import PipeConsole

    console = PipeConsole()
    console.print(table)
    if not is_on:
        print("Trained once, since offload is off. Enable it with --fine-grained-activation-offloading.")
    for name, found in differences.items():
        text = f"The {name} differ, first in step {found.step}: {found.what}. Please report this with the argument file."
        console.print(text, style="bold red", soft_wrap=True)


def _measure(
    path: Path, options: argparse.Namespace, megatron_flags: Sequence[str], launch: Launch
) -> "tuple[dict[str, RunRecord], str]":
    """Train without offload and, if the flags enable it, with offload. Return the records, keyed by label, and the title."""
    from fgoffload.cli.progress import show_progress

    with show_progress(is_shown=launch.is_first) as start_run:
        with launch.show_errors_once(), hold_messages():
            # Importing torch and Megatron-Core takes seconds, so checks that do not use them have already run.
            from fgoffload.integrations.megatron.patching.imports import require_torch

            require_torch()
            from fgoffload.cli.measurement import describe_training, load_training, measure_training, process_groups
            from fgoffload.cli.report import WITH, WITHOUT

            training = load_training(
                path,
                megatron_flags,
                own_flags=options.own_flags,
                data=options.data,
                steps=options.steps,
                world_size=launch.world_size,
            )
        offload = training.arguments.offload
        records = {}
        with process_groups(training.arguments, launch):
            for label, option in ((WITHOUT, None), (WITH, offload))[: 1 if offload is None else 2]:
                on_step = start_run(label, training.arguments.train_iters)
                records[label] = measure_training(training, option, on_step=on_step)
    return records, describe_training(training.arguments)
