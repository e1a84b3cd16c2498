"""Shows the library's log messages on the terminal, and handles closed output pipes."""

import contextlib
import logging
import logging.handlers
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
"""Loggers whose INFO messages are shown. They report CPU support, automatic plans, and the memory saved for a Trainer."""


class LibraryLog(logging.Handler):
    """Shows each log message of the library once on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()
        self._held: list[logging.LogRecord] | None = None
        """Messages to show later. None if messages are shown immediately."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show `record` unless it was shown before, or hold it."""
        if self._held is not None:
            self._held.append(record)
            return
        is_warning = record.levelno >= logging.WARNING
        text = record.getMessage()
        message = shorten_message(" ".join(text.split())) if is_warning else text  # a plan has several lines
        if message in self._shown or not (is_warning or record.name in _SHOWN_INFO):
            return
        self._shown.add(message)
        # Progress bars replace `sys.stderr`, so that lines appear above them.
        print(f"fgoffload: {'warning: ' if is_warning else ''}{message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Show messages only after the body, and drop them if it raises, so that an error is the only line."""
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
        """Show messages until the body ends. Do not pass them to the root logger, whose handlers would show them too."""
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
    """Show the library's messages only after the body. See `LibraryLog.held`."""
    with contextlib.ExitStack() as held:
        for handler in logging.getLogger(_LIBRARY).handlers:
            if isinstance(handler, LibraryLog):
                held.enter_context(handler.held())
        yield


@contextlib.contextmanager
def collect_info(name: str) -> Iterator[list[str]]:
    """Collect the INFO messages of the logger `name` and its children. The list is filled when the body ends."""
    found: list[str] = []
    logger, buffer = logging.getLogger(name), logging.handlers.BufferingHandler(capacity=10_000)
    logger.addHandler(buffer)
    try:
        yield found
    finally:
        logger.removeHandler(buffer)
        found += [record.getMessage() for record in buffer.buffer if record.levelno == logging.INFO]


@contextlib.contextmanager
def flush_at_end() -> Iterator[None]:
    """Flush stdout and stderr when the body ends, so that a closed pipe raises here.

    Raises:
        BrokenPipeError: The reader has closed the pipe, as with `| head -2`.
        OSError: The output cannot be written, for example because the disk is full.
    """
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if the shell closed it
                stream.flush()


def drop_unread_output() -> None:
    """Discard unwritten output. Otherwise Python flushes it at exit, and reports the error a second time."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
