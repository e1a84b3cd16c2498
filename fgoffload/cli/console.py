"""The terminal, as rich shows tables and bars on it."""

from typing import NoReturn

from rich.console import Console


class PipeConsole(Console):
    """A console that raises when its reader has gone; rich's own ends the process with 1, which means a difference here."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what writing raised."""
        raise BrokenPipeError
