"""What goes to the terminal around the results: library messages, and a reader that stops reading."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from fgoffload.errors import cut_values

_LIBRARY = "fgoffload"
_SHOWN_INFO = (
    "fgoffload.integrations.megatron.patching.cpu_support",
    "fgoffload.integrations.megatron.auto.auto_offload",
    "fgoffload.integrations.transformers.launch",
    "fgoffload.integrations.transformers.callback",
)
"""The loggers whose INFO is shown too: what says that symbols of torch and Megatron-Core are replaced, what `--offload-modules
auto` has planned, and that a trainer is offloaded and what that saved."""


class LibraryLog(logging.Handler):
    """Shows the library's warnings on stderr as messages of this program, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()
        self._is_silent = False
        self._held: list[logging.LogRecord] | None = None
        """What is not shown yet; None where everything is shown at once."""

    def silence(self) -> None:
        """Show nothing from now on: after Ctrl-C, what is left unfinished is no news."""
        self._is_silent = True

    def emit(self, record: logging.LogRecord) -> None:
        """Show `record` unless it was shown before, or hold it."""
        if self._held is not None:
            self._held.append(record)
            return
        message = cut_values(" ".join(record.getMessage().split()))
        is_warning = record.levelno >= logging.WARNING
        if self._is_silent or message in self._shown or not (is_warning or record.name in _SHOWN_INFO):
            return
        self._shown.add(message)
        # `sys.stderr` at this moment: while bars are shown it is the progress console's, which prints above them.
        print(f"fgoffload: {'warning: ' if is_warning else ''}{message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Show messages when the body has ended, and none of them where it raises: an error is one line."""
        held: list[logging.LogRecord] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
        for record in held:  # not reached where the body has raised
            self.emit(record)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Show messages until the body ends, and nobody else: a script may give the root logger handlers of its own."""
        logger = logging.getLogger(_LIBRARY)
        level, propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


@contextlib.contextmanager
def hold_messages() -> Iterator[None]:
    """Show what the library says when the body has ended, and nothing of it where the body raises. See `LibraryLog.held`."""
    with contextlib.ExitStack() as held:
        for handler in logging.getLogger(_LIBRARY).handlers:
            if isinstance(handler, LibraryLog):
                held.enter_context(handler.held())
        yield


class _Collector(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._found.append(record.getMessage())


@contextlib.contextmanager
def collect_info(name: str) -> Iterator[list[str]]:
    """Collect what the logger called `name` and those below it say at INFO until the body ends."""
    found: list[str] = []
    logger, collector = logging.getLogger(name), _Collector(found)
    logger.addHandler(collector)
    try:
        yield found
    finally:
        logger.removeHandler(collector)


@contextlib.contextmanager
def flush_at_end() -> Iterator[None]:
    """Write out what is buffered when the body ends, so that a reader that has gone is noticed here.

    Raises:
        BrokenPipeError: Nobody reads any more, as after `| head -2`.
        OSError: There is no room, as on a full disk.
    """
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None where the shell closed it
                stream.flush()


def drop_unread_output() -> None:
    """Discard what cannot be written: Python flushes at exit, and would report the fault again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
