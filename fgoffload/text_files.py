"""Reading the files that users name."""

import json
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError, OffloadError


def read_text_file(path: Path, *, name: str, fix: str, error_type: type[OffloadError] = ConfigError) -> str:
    """Return the text of the file at `path`, which is UTF-8. A byte order mark, as editors of Windows write it, is left out.

    Args:
        path: The file.
        name: What it is to the user, for the error: `profile p.json`.
        fix: What to do instead, as a sentence.
        error_type: What to raise.

    Raises:
        OffloadError: The file cannot be read, as `error_type`.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise error_type(f"{name}: {reason}. {fix}") from error


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
