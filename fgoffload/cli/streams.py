"""Terminal output other than results: messages of the library, and closed pipes."""

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
"""Loggers whose INFO messages are shown: replaced symbols, plans of `--offload-modules auto`, offloaded trainers and their
savings."""


class LibraryLog(logging.Handler):
    """Shows each warning of the library once on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()
        self._held: list[logging.LogRecord] | None = None
        """Messages to show later. None if messages are shown at once."""

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
        """Show messages only after the body ends, and drop them if it raises, since an error is one line."""
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
        """Show messages until the body ends, and keep them from the root logger, which a script may configure."""
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
    """Show the library's messages only after the body ends. See `LibraryLog.held`."""
    with contextlib.ExitStack() as held:
        for handler in logging.getLogger(_LIBRARY).handlers:
            if isinstance(handler, LibraryLog):
                held.enter_context(handler.held())
        yield


@contextlib.contextmanager
def collect_info(name: str) -> Iterator[list[str]]:
    """Collect the INFO messages of the logger `name` and its children. The list has them after the body."""
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
    """Discard unwritten output, since Python flushes it at exit and would report the error again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
