"""Shows errors on one line, with the traceback on request."""

import contextlib
import os
import sys
import traceback

TRACEBACK_VARIABLE = "FGOFFLOAD_TRACEBACK"
"""Environment variable that enables tracebacks, unless its value is empty or 0."""


def show_error(error: Exception) -> None:
    """Show `error` on one line of stderr. If `FGOFFLOAD_TRACEBACK` is set, show the traceback first."""
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    show_line(f"error: {error}")


def show_line(message: str) -> None:
    """Show `message` on stderr as one line that starts with the program's name."""
    with contextlib.suppress(OSError):  # if stderr is closed, only the exit code reports the error
        print(f"fgoffload: {' '.join(message.split())}", file=sys.stderr, flush=True)
