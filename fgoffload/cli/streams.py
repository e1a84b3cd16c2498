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
        """Hold `record` while messages are held. Otherwise, show it unless the same message was already shown."""
        if self._held is not None:
            self._held.append(record)
            return
        is_warning = record.levelno >= logging.WARNING
        text = record.getMessage()
        message = shorten_message(" ".join(text.split())) if is_warning else text  # a plan spans several lines
        if message in self._shown or not (is_warning or record.name in _SHOWN_INFO):
            return
        self._shown.add(message)
        # Look up `sys.stderr` now: progress bars replace it, so that messages appear above them.
        print(f"fgoffload: {'warning: ' if is_warning else ''}{message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold messages until the body ends. If it raises, drop them, so that only the error is shown."""
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
        """Show messages until the body ends, without passing them to the root logger, whose handlers would show them again."""
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
    """Hold the library's messages until the body ends, and drop them if it raises."""
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
    """Discard unwritten output. Otherwise, Python would flush it at exit and report the error again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
