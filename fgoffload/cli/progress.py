"""Shows progress bars of training runs on stderr, so that stdout has only results."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fgoffload.cli.console import PipeConsole

StartRun: TypeAlias = Callable[[str, int], Callable[[float], None]]
"""Adds a bar for a run, given its label and number of steps. Returns a function to call with the loss after each step."""


@contextlib.contextmanager
def show_progress(*, is_shown: bool = True) -> Iterator[StartRun]:
    """Show one bar for each run until the body ends."""
    console = PipeConsole(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[loss]}"))
    is_disabled = not (is_shown and console.is_terminal)
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=is_disabled) as progress:
        loading = progress.add_task("loading torch and Megatron-Core", total=None, loss="")

        def start_run(label: str, steps: int) -> Callable[[float], None]:
            progress.update(loading, visible=False)
            # A bar would clutter a log file, but no output at all would look like a hang.
            if is_shown and is_disabled:
                console.print(f"training {label}: {steps} {'step' if steps == 1 else 'steps'}")
            task = progress.add_task(label, total=steps, loss="")
            return lambda loss: progress.update(task, advance=1, loss=f"loss {loss:.4f}")

        yield start_run
