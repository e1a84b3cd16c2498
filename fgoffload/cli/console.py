"""A rich console for tables and progress bars."""

from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table


class PipeConsole(Console):
    """A console that raises on a closed pipe. rich's own exits with 1, which means a difference here."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error of the write."""
        raise BrokenPipeError


def make_table(*, left: Sequence[str] = (), right: Sequence[str] = (), last: Sequence[str] = (), **options: Any) -> Table:
    """Return an empty table with columns of text, columns of numbers, and more columns of text."""
    table = Table(**options)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for heading in last:
        table.add_column(heading)
    return table
