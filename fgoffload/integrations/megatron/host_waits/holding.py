"""Delays copies of groups until the host has finished another wait."""

from collections.abc import Callable
from types import TracebackType


class Holding:
    """Context manager that holds ended groups. One object serves all layers, since they do not nest."""

    __slots__ = ("_submit", "is_on")

    def __init__(self, submit: Callable[[], None]) -> None:
        self._submit = submit
        self.is_on = False

    def flush(self) -> None:
        """Submit held groups and stop holding."""
        self.is_on = False
        self._submit()

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self.is_on:
            self.flush()
        self.is_on = False  # after an exception, held groups are abandoned
