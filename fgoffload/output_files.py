"""Writing files whole or not at all: a full disk or an interrupt leaves the older file as it was."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_LONGEST_SUFFIX = 20
"""Characters, of suffixes that a writer may look at: `.json.gz`."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write to, whose file takes the place of the one at `path` when the body ends.

        with replacing(path) as partial:
            figure.savefig(partial)

    It lies in the same folder and its name ends alike, for writers that look at suffixes. What is no regular file, as
    `/dev/stdout`, is written to directly. Of a link the file that it leads to is replaced.

    Raises:
        OSError: The file at `path` cannot be written or replaced. It is as before, and so it is where the body raises.
    """
    target = Path(os.path.realpath(path))
    mode = _find_mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    # Not the whole name, which may be as long as names can be.
    partial = target.with_name(f".fgoffload-{os.getpid()}{''.join(target.suffixes[-2:])[-_LONGEST_SUFFIX:]}")
    try:
        yield partial
        _flush_to_disk(partial)
        if mode is not None:
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to the file at `path`, whole or not at all.

    Raises:
        OSError: It cannot be written; the older file is as before.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Check that `path` can be written later on, by writing an empty file beside it.

    Raises:
        OSError: It cannot.
    """
    with contextlib.suppress(_OnlyCheckingError), replacing(path) as partial:
        with partial.open("ab"):
            pass
        raise _OnlyCheckingError


class _OnlyCheckingError(Exception):
    """Leaves `replacing` without a replacement."""


def _find_mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _flush_to_disk(path: Path) -> None:
    """Have the file at `path` on disk. Some file systems say only now that they are full."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
