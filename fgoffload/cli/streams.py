"""Terminal output other than results: library messages and closed pipes."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from fgoffload.errors import shorten_message

_LIBRARY = "fgoffload"
_SHOWN_INFO = (
    "fgoffload.integrations.megatron.patching.cpu_support",
    "fgoffload.integrations.megatron.auto.auto_offload",
    "fgoffload.integrations.budget.handle",
    "fgoffload.integrations.transformers.launch",
    "fgoffload.integrations.transformers.callback",
)
"""Loggers whose INFO is shown too: replaced symbols, the plans of `--offload-modules auto`, and offloaded trainers with their
savings."""


class LibraryLog(logging.Handler):
    """Shows each warning of the library once on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()
        self._is_silent = False
        self._held: list[logging.LogRecord] | None = None
        """Messages held back; None if messages are shown at once."""

    def silence(self) -> None:
        """Show nothing from now on."""
        self._is_silent = True

    def emit(self, record: logging.LogRecord) -> None:
        """Show `record` unless it was shown before, or hold it."""
        if self._held is not None:
            self._held.append(record)
            return
        message = shorten_message(" ".join(record.getMessage().split()))
        is_warning = record.levelno >= logging.WARNING
        if self._is_silent or message in self._shown or not (is_warning or record.name in _SHOWN_INFO):
            return
        self._shown.add(message)
        # Look up `sys.stderr` now: with progress bars it is their console, which prints above them.
        print(f"fgoffload: {'warning: ' if is_warning else ''}{message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold messages back until the body ends, and drop them if it raises: an error is one line."""
        held: list[logging.LogRecord] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
        for record in held:  # not reached if the body raises
            self.emit(record)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Show messages until the body ends, without the root logger, which a script may configure."""
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
    """Hold the library's messages back until the body ends. See `LibraryLog.held`."""
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
    """Collect INFO messages of the logger `name` and its children until the body ends."""
    found: list[str] = []
    logger, collector = logging.getLogger(name), _Collector(found)
    logger.addHandler(collector)
    try:
        yield found
    finally:
        logger.removeHandler(collector)


@contextlib.contextmanager
def flush_at_end() -> Iterator[None]:
    """Flush the output when the body ends, so that a closed pipe raises here.

    Raises:
        BrokenPipeError: The pipe is closed, as with `| head -2`.
        OSError: The output cannot be written, as on a full disk.
    """
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if the shell closed it
                stream.flush()


def drop_unread_output() -> None:
    """Discard unwritten output: Python flushes at exit, and would report the error again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
