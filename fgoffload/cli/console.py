"""A rich console for tables and progress bars."""

from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table


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
