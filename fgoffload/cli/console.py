"""A rich console for tables and progress bars."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from fgoffload.cli.errors import show_line

PATIENCE_S = 2.0
"""Seconds of work after which a progress line is printed."""


class PipeConsole(Console):
    """A console that raises an error if its pipe is closed. rich would exit with 1, our exit code for results that differ."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise an error, so that `main` returns the exit code for a closed pipe."""
        raise BrokenPipeError


def make_table(*, left: Sequence[str] = (), right: Sequence[str] = (), last: Sequence[str] = (), **options: Any) -> Table:
    """Return an empty table with left-aligned, then right-aligned, then more left-aligned columns."""
    table = Table(**options)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for heading in last:
        table.add_column(heading)
    return table


@contextlib.contextmanager
def show_working(task: str) -> Iterator[None]:
    """Show a spinner on a terminal. Elsewhere, print a line if the body takes more than two seconds."""
    bar = PipeConsole(stderr=True)
    if bar.is_terminal:
        with bar.status(task):
            yield
        return
    late = threading.Timer(PATIENCE_S, show_line, (f"{task} ...",))
    late.start()
    try:
        yield
    finally:
        late.cancel()
