"""Progress bars of trainings, on stderr, so that stdout has only results."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fgoffload.cli.console import PipeConsole


class TrainingProgress:
    """One bar for each training."""

    def __init__(self, progress: Progress, loading: TaskID, *, is_shown: bool) -> None:
        self._progress = progress
        self._loading: TaskID | None = loading
        # In a log file a bar is noise, but silence looks like a hang: print one line instead.
        self._is_log = is_shown and not progress.console.is_terminal

    def start_run(self, label: str, *, steps: int) -> Callable[[float], None]:
        """Add the bar of a training run, and return a function that steps call with their loss."""
        if self._loading is not None:
            self._progress.remove_task(self._loading)
            self._loading = None
        if self._is_log:
            self._progress.console.print(f"training {label}: {steps} {'step' if steps == 1 else 'steps'}")
        task = self._progress.add_task(label, total=steps, loss="")

        def on_step(loss: float) -> None:
            self._progress.update(task, advance=1, loss=f"loss {loss:.4f}")

        return on_step


@contextlib.contextmanager
def show_progress(*, is_shown: bool = True) -> Iterator[TrainingProgress]:
    """Show progress until the body ends. The bars disappear if it raises."""
    console = PipeConsole(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as progress:
        loading = progress.add_task("loading torch and Megatron-Core", total=None, loss="")
        try:
            yield TrainingProgress(progress, loading, is_shown=is_shown)
        except BaseException:
            for task in progress.task_ids:
                progress.remove_task(task)
            raise
