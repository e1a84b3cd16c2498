"""Shows where the time of traced steps goes, by setting: for the terminal, and as `traces.md`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from fgoffload.benchmark.idle import IdleTime, find_idle_time
from fgoffload.benchmark.job import name_trace
from fgoffload.benchmark.markdown import format_rows
from fgoffload.benchmark.settings import Setting
from fgoffload.benchmark.traces import Event, is_copy, read_events

HEADINGS = (
    "setting",
    "first to last kernel, ms",
    "kernels run",
    "launched late",
    "in gaps of at most",
    "other idle time",
    "in gaps of at most",
    "copies to the host",
    "copies back",
)
"""Of the table. All are milliseconds."""

LEGEND = """\
All are milliseconds of one step under torch's profiler, which makes the host slower: idle times are longer than without it.
"Kernels run": at least one did. "Launched late": none ran, and the next one was launched only then. All other idle time is
before kernels that had been launched. Copies run beside kernels."""
"""Below the table of the page."""

NO_KERNEL = "No kernel was traced: this device is no GPU."


def read_traces(folder: Path, settings: Iterable[Setting], *, ranks: int = 1) -> Mapping[str, tuple[str, ...]]:
    """Return the cells under `HEADINGS`, but for the first, of each rank and setting that left a trace with kernels.

    Args:
        folder: Where the traces are.
        settings: In the order of the table.
        ranks: Processes of the training, each of which leaves a trace.
    """
    rows: dict[str, tuple[str, ...]] = {}
    for setting in dict.fromkeys(settings):
        for rank in range(ranks):
            path = folder / name_trace(setting, rank=rank)
            if not path.exists():
                continue
            events = read_events(path)
            idle = find_idle_time(events)
            if idle is not None:
                rows[f"{setting.name}, rank {rank}" if rank else setting.name] = _list_cells(events, idle)
    return rows


def build_trace_table(rows: Mapping[str, tuple[str, ...]]) -> Table:
    """Return the table for the terminal."""
    table = Table(*HEADINGS, title="one traced step, ms", title_justify="left")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def format_traces(rows: Mapping[str, tuple[str, ...]]) -> str:
    """Return the page `traces.md`."""
    if not rows:
        return f"{NO_KERNEL}\n"
    lines = format_rows(HEADINGS, ((name, *cells) for name, cells in rows.items()))
    return "\n".join([*lines, "", LEGEND, ""])


def _list_cells(events: Sequence[Event], idle: IdleTime) -> tuple[str, ...]:
    longest = {False: 0.0, True: 0.0}
    for gap in idle.gaps:
        longest[gap.is_late_launch] = max(longest[gap.is_late_launch], gap.span.ms)
    copies = (sum(event["dur"] for event in events if is_copy(event, way=way)) / 1e3 for way in ("DtoH", "HtoD"))
    return (
        *(f"{idle.span_ms:.1f}", f"{idle.busy_ms:.1f}"),
        *(f"{idle.late_ms:.1f}", f"{longest[True]:.2f}"),
        *(f"{idle.idle_ms - idle.late_ms:.1f}", f"{longest[False]:.2f}"),
        *(f"{copy_ms:.1f}" for copy_ms in copies),
    )
