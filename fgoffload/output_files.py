"""Writes files atomically: a full disk or an interrupt cannot damage the old file."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file written there replaces the file at `path` on exit.

        with replacing(path) as partial:
            figure.savefig(partial)

    The temporary path has the folder and suffix of `path`. A `path` that is not a regular file, such as `/dev/stdout`, is
    written directly. If `path` is a symbolic link, its target is replaced. If the body raises, the old file is unchanged.

    Raises:
        OSError: The file cannot be written or replaced. The old file is unchanged.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    # Writers may check the suffix, such as `.json.gz`. The stem is dropped, because it may already have the maximum length.
    partial = target.with_name(f".fgoffload-{os.getpid()}{''.join(target.suffixes[-2:])[-20:]}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
        if mode is not None:
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to the file at `path`, atomically. See `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise `OSError` if `path` is not writable. The check creates and deletes an empty file next to `path`."""
    with contextlib.suppress(_CheckDoneError), replacing(path) as partial:
        with partial.open("ab"):
            pass
        raise _CheckDoneError


class _CheckDoneError(Exception):
    """Raised to exit `replacing` without replacing the file."""
