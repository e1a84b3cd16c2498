"""Reads text and JSON files that users pass."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError, OffloadError
from fgoffload.units import MIB, format_bytes

MAX_TEXT_BYTES = 256 * MIB
"""Maximum size of a decompressed file. A profile of 128 layers takes a few MiB."""


def read_text_file(path: Path, *, name: str, fix: str, error_type: type[OffloadError] = ConfigError) -> str:
    """Return the UTF-8 text of the file at `path`, decompressed if its name ends with `.gz`.

    The byte order mark is removed, and line endings are normalized. Errors begin with `name`, such as `profile p.json`, and
    end with the sentence `fix`.

    Raises:
        OffloadError: The file cannot be read. The error's type is `error_type`.
    """
    try:
        with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else file as source:
            content = source.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            when = " after decompression" if path.suffix == ".gz" else ""
            raise error_type(f"{name}: larger than {format_bytes(MAX_TEXT_BYTES)}{when}. {fix}")
        text = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise error_type(f"{name}: not a valid gzip file. {fix}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise error_type(f"{name}: {reason}. {fix}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str, *, name: str, fix: str, error_type: type[OffloadError] = ConfigError) -> Any:
    """Parse JSON text. See `read_text_file` for the other arguments.

    Raises:
        OffloadError: The text is not JSON, is nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{name} is not JSON: {error}. {fix}") from error
