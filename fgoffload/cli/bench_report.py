"""Shows a benchmark: the tables on the terminal, and the pages and the picture that are written when all is measured."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fgoffload.benchmark.frontier import write_frontier_plot
from fgoffload.benchmark.report import (
    build_bits_table,
    build_budget_table,
    build_times_table,
    compare_bits,
    format_bits,
    format_markdown,
    name_run,
)
from fgoffload.benchmark.results import BITS_NAME, MARKDOWN_NAME, PICTURE_NAME, Results
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.cli.errors import show_line
from fgoffload.output_files import write_file


def show_bits(console: Console, results: Results, surroundings: Surroundings, *, folder: Path) -> bool:
    """Print how the bits of each setting compare with those of `baseline`, and return whether all were compared and are equal.

    Args:
        console: Where the table goes.
        results: With the bits of all settings.
        surroundings: What they were computed on.
        folder: Where the page goes.
    """
    rows = compare_bits(results.outcomes)
    write_file(folder / BITS_NAME, format_bits(rows, results.workload, surroundings))
    console.print(build_bits_table(rows, results.workload, surroundings))
    return all(row.is_equal for row in rows)


def show_times(
    console: Console, results: Results, surroundings: Surroundings, *, folder: Path, budgets_bytes: Sequence[int]
) -> None:
    """Print the tables of times and memory, and write the page and the picture.

    Args:
        console: Where the tables go.
        results: With the measurements of all settings.
        surroundings: What they were measured on.
        folder: Where the files go.
        budgets_bytes: Device memory to find the fastest of each system within.
    """
    summaries, workload, predictions = results.summarize(), results.workload, results.predictions
    write_file(folder / MARKDOWN_NAME, format_markdown(summaries, workload, surroundings, predictions))
    console.print(build_times_table(summaries, workload, surroundings, predictions))
    if budgets_bytes:
        console.print(build_budget_table(summaries, budgets_bytes))
    try:
        write_frontier_plot(folder / PICTURE_NAME, summaries, title=name_run(workload, surroundings))
    except ImportError as error:  # machines with GPUs often have little else, and the numbers are there
        show_line(f"warning: there is no {PICTURE_NAME}: {error}. Install matplotlib.")
    print(f"Tables, picture and logs: {folder}")
