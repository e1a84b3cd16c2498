"""How the command line shows errors: in one line, with a traceback only for those who ask."""

import os
import sys
import traceback

TRACEBACK_VARIABLE = "FGOFFLOAD_TRACEBACK"
"""Environment variable: anything but empty or 0 shows the traceback of an error before its line."""


def show_error(error: Exception) -> None:
    """Show `error` on stderr in one line, after its traceback where `FGOFFLOAD_TRACEBACK` asks for it."""
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
        return  # stderr is full: the exit code alone can tell
