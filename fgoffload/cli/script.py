"""Runs a Python script in this process, as `python SCRIPT ARGUMENTS` does."""

import ast
import contextlib
import importlib.util
import os
import runpy
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType

from fgoffload.cli.options import explain_unusable_file
from fgoffload.errors import BudgetError, OffloadError

EXIT_FAILED = 1  # Python's exit code for an uncaught exception
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def find_fault(script: str) -> str | None:
    """Return why Python cannot run the file `script`, as the end of a sentence, or None if it can."""
    if not os.path.isfile(script):
        return explain_unusable_file(script)
    try:
        with open(script, "rb") as file:
            source = file.read()
        if not (source.startswith(importlib.util.MAGIC_NUMBER) or zipfile.is_zipfile(script)):  # neither bytecode nor archive
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(source, script, "exec", dont_inherit=True)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"is not Python source: {error}"
    return None


def imports_any(script: str, packages: Collection[str]) -> bool:
    """Return whether the source of `script` imports one of `packages`."""
    try:
        with open(script, "rb") as file:
            nodes = list(ast.walk(ast.parse(file.read())))
    except (SyntaxError, ValueError):  # bytecode or an archive
        return False
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] in packages for name in names)


@contextlib.contextmanager
def script_folder_first(script: str) -> Iterator[None]:
    """Put the folder of `script` first in `sys.path`, in place of this program's own folder, as if Python ran the script."""
    folder = os.path.dirname(os.path.realpath(script))
    before = list(sys.path)
    own = {"", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    sys.path[:] = [folder, *(sys.path[1:] if sys.path[:1] and sys.path[0] in own else sys.path)]
    try:
        yield
    finally:
        sys.path[:] = before


def run_script(script: str, words: Sequence[str], *, own_errors: tuple[type[OffloadError], ...] = (BudgetError,)) -> int:
    """Run `script` as `__main__`, and return the exit code that Python would return.

    Tracebacks start in the script. `own_errors`, which a flag of `fgoffload run` may cause, are raised, for `main` to show.
    """
    before = list(sys.argv)
    sys.argv[:] = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        return _read_exit_code(ended)
    except own_errors:
        raise
    except BaseException as error:  # noqa: BLE001 - show every exception, as Python does
        error.__traceback__ = _find_own_part(error.__traceback__, script)
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    finally:
        sys.argv[:] = before
    return 0


def _read_exit_code(ended: SystemExit) -> int:
    """Return the exit code of `ended`. If `ended` has a message instead, print it to stderr, as Python does."""
    if ended.code is None or isinstance(ended.code, int):
        return int(ended.code or 0)
    print(ended.code, file=sys.stderr)
    return EXIT_FAILED


def _find_own_part(traceback: TracebackType | None, script: str) -> TracebackType | None:
    """Return the part of `traceback` from the script's first frame on, or None if the script did not run."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != script:
        traceback = traceback.tb_next
    return traceback
