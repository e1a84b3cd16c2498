"""Shows errors in one line; the traceback is optional."""

import os
import sys
import traceback

TRACEBACK_VARIABLE = "FGOFFLOAD_TRACEBACK"
"""Environment variable that shows the traceback before an error's line, unless it is empty or 0."""


def show_error(error: Exception) -> None:
    """Show `error` on stderr in one line, after its traceback if `FGOFFLOAD_TRACEBACK` is set."""
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    show_line(f"error: {error}")


def show_line(message: str) -> None:
    """Show `message` on stderr in one line, under the program's name."""
    try:
        print(f"fgoffload: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return  # stderr cannot be written: only the exit code is left
