"""Shows a benchmark: the tables on the terminal, and the pages and the picture that are written when all is measured."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fgoffload.benchmark.frontier import write_frontier_plot
from fgoffload.benchmark.prediction_report import build_prediction_tables, format_predictions
from fgoffload.benchmark.report import (
    build_bits_table,
    build_budget_table,
    build_times_table,
    compare_bits,
    format_bits,
    format_markdown,
    name_run,
)
from fgoffload.benchmark.results import (
    BITS_NAME,
    MARKDOWN_NAME,
    PICTURE_NAME,
    PREDICTIONS_NAME,
    SEARCH_NAME,
    TRACES_NAME,
    Results,
)
from fgoffload.benchmark.search_report import build_search_table, format_search
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.benchmark.trace_report import build_trace_table, format_traces, read_traces
from fgoffload.cli.errors import show_line
from fgoffload.output_files import write_file


def show_bits(console: Console, results: Results, surroundings: Surroundings, *, folder: Path) -> bool:
    """Print how the bits of each setting compare with those of `nothing`, and return whether all were compared and are equal.

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
    console: Console,
    results: Results,
    surroundings: Surroundings,
    *,
    folder: Path,
    budgets_bytes: Sequence[int],
    has_traces: bool,
) -> None:
    """Print the tables of times and memory, and write the pages and the picture.

    Args:
        console: Where the tables go.
        results: With the measurements of all settings.
        surroundings: What they were measured on.
        folder: Where the files go, and where the traces are.
        budgets_bytes: Device memory to find the fastest of each system within.
        has_traces: Whether a step of each setting was traced.
    """
    summaries, workload, forecasts = results.summarize(), results.workload, results.forecasts
    pages = {
        MARKDOWN_NAME: format_markdown(summaries, workload, surroundings, forecasts),
        PREDICTIONS_NAME: format_predictions(summaries, forecasts, workload, surroundings),
    }
    if results.search is not None:
        pages[SEARCH_NAME] = format_search(results.search, summaries)
    ranks = results.workload.world_size
    traces = read_traces(folder, (one.setting for one in summaries), ranks=ranks) if has_traces else {}
    if has_traces:
        pages[TRACES_NAME] = format_traces(traces)
    for name, page in pages.items():
        write_file(folder / name, page)
    console.print(build_times_table(summaries, workload, surroundings, forecasts))
    if budgets_bytes:
        console.print(build_budget_table(summaries, budgets_bytes))
    if results.search is not None:
        console.print(build_search_table(results.search, summaries))
    for table in build_prediction_tables(summaries, forecasts):
        console.print(table)
    if traces:
        console.print(build_trace_table(traces))
    title = name_run(workload, surroundings)
    try:
        write_frontier_plot(folder / PICTURE_NAME, summaries, title=title, forecasts=forecasts)
    except ImportError as error:  # machines with GPUs often have little else, and the numbers are there
        show_line(f"warning: there is no {PICTURE_NAME}: {error}. Install matplotlib.")
    print(f"Tables, picture and logs: {folder}")
