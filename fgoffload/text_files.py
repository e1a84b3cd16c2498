"""Reading the files that users name."""

import gzip
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError, OffloadError
from fgoffload.units import MIB, format_bytes

LARGEST_TEXT_BYTES = 256 * MIB
"""Of a file that is read, unpacked. A profile of 128 layers has a few MiB."""


def read_text_file(path: Path, *, name: str, fix: str, error_type: type[OffloadError] = ConfigError) -> str:
    """Return the text of the file at `path`, which is UTF-8, packed where its name ends with `.gz`.

    A byte order mark, as editors of Windows write it, is left out, and lines end as everywhere.

    Args:
        path: The file.
        name: What it is to the user, for the error: `profile p.json`.
        fix: What to do instead, as a sentence.
        error_type: What to raise.

    Raises:
        OffloadError: The file cannot be read, as `error_type`.
    """
    try:
        content = _read(path)
        if content is None:
            raise error_type(f"{name}: no regular file. {fix}")
        if len(content) > LARGEST_TEXT_BYTES:
            unpacked = ", unpacked" if path.suffix == ".gz" else ""
            raise error_type(f"{name}: larger than {format_bytes(LARGEST_TEXT_BYTES)}{unpacked}. {fix}")
        text = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise error_type(f"{name}: not packed by gzip, or cut off. {fix}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise error_type(f"{name}: {reason}. {fix}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> bytes | None:
    """Return what is in the file at `path`, up to a byte more than may be; None where it is no regular file."""
    # Opening a pipe that nobody writes to would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file, gzip.open(file) if path.suffix == ".gz" else file as unpacked:
            return unpacked.read(LARGEST_TEXT_BYTES + 1)
    finally:
        os.close(descriptor)


def parse_json(text: str, *, name: str, fix: str, error_type: type[OffloadError] = ConfigError) -> Any:
    """Return what `text`, which is JSON, describes.

    Args:
        text: Of a file.
        name: What it is to the user, for the error.
        fix: What to do instead, as a sentence.
        error_type: What to raise.

    Raises:
        OffloadError: It is not JSON, or none that Python reads: brackets in thousands, a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{name} is not JSON: {error}. {fix}") from error
