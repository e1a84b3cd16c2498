"""A rich console for tables and progress bars."""

from typing import NoReturn

from rich.console import Console


class PipeConsole(Console):
    """A console that raises on a closed pipe. rich's own exits with 1, which means a difference here."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error of the write."""
        raise BrokenPipeError
