"""Parsing of options that commands share."""

import argparse
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fgoffload.cli.shipped_models import find_model, suggest_model
from fgoffload.errors import ConfigError
from fgoffload.output_files import check_writable

DATA_HELP = "text file or folder (default: Python's standard library)"


def add_argument_file(parser: argparse.ArgumentParser, *, meaning: str = "") -> None:
    """Add the argument file to `parser`. It may be missing there, so that our own error reports it."""
    meaning = meaning or "a Megatron argument file, or a name of `fgoffload plan --list`"
    parser.add_argument("arguments_file", metavar="ARGUMENTS.sh", nargs="?", help=meaning)


def suggest(word: str, known: Collection[str]) -> str:
    """Return ` Did you mean --json?` with the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


def check_argument_file(name: str | None, *, example: str, flags: Sequence[str] = (), own_flags: Collection[str] = ()) -> Path:
    """Return the path of an argument file.

    Args:
        name: A path or the name of a shipped model, as typed; None if missing.
        example: A complete command line.
        flags: Remaining words: Megatron's flags and their values.
        own_flags: The command's own flags, for suggestions.

    Raises:
        ConfigError: It is missing, not a file, or of another kind.
    """
    meant = suggest(flags[0], own_flags) if flags else ""
    if not name:
        raise ConfigError(f"ARGUMENTS.sh is missing. Give a Megatron argument file first, as in: {example}.{meant}")
    # os.path, since Path.is_file raises on a name that is too long.
    if not os.path.isfile(name):
        if (shipped := find_model(name)) is not None:
            return shipped
        meant = meant or suggest_model(name)
        raise ConfigError(f"argument file {name!r} {say_why_no_file(name)}.{meant} Give a file, before any Megatron flag.")
    if name.endswith(".json"):
        raise ConfigError(
            f"argument file {name!r} is JSON, but a training run needs Megatron's flags. Give a Megatron argument file, as in: "
            f"{example}. To plan for a Hugging Face config.json: fgoffload plan {name} --gpu h100."
        )
    return Path(name)


def read_count(text: str, *, flag: str, example: int, hint: str = "") -> int:
    """Parse a whole number of at least 1.

    Args:
        text: As typed.
        flag: Its flag.
        example: A valid number.
        hint: Text to add if it is below 1.

    Raises:
        ConfigError: `text` is not such a number.
    """
    # Not int() alone: it accepts ` 1_0 `, and has its own error for thousands of digits.
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise ConfigError(f"{flag} {text!r} is not a whole number. Give 1 or more, as in {example}.")
    count = int(text)
    if count < 1:
        raise ConfigError(f"{flag} {count} is below 1. Give 1 or more{hint}.")
    return count


def say_why_no_file(name: str) -> str:
    """Return why `name` is not a regular file, as the end of a sentence."""
    if os.path.isdir(name):
        return "is a folder"
    return "is not a regular file" if os.path.exists(name) else "does not exist"


def check_output_file(
    name: str | None, *, flag: str, example: str, inputs: Mapping[str, str | os.PathLike[str] | None]
) -> Path | None:
    """Check an output file before the work starts, and return its path, or None without one.

    Args:
        name: As typed.
        flag: Its flag.
        example: A valid name.
        inputs: Input files by description, which must not be overwritten; None if not given.

    Raises:
        ConfigError: It cannot be written, or is an input.
    """
    if name is None:
        return None
    path = os.path.expanduser(name)
    folder = os.path.dirname(path) or os.curdir
    if not name:
        why = "names no file"
    elif os.path.isdir(path) or not os.path.basename(path):
        why = "is a folder"
    elif not os.path.isdir(folder):
        why = f"is in {folder!r}, which {say_why_no_folder(folder)}"
    elif not _can_write(Path(path)):
        why = "is not writable"
    else:
        read = {os.path.realpath(os.path.expanduser(given)): what for what, given in inputs.items() if given is not None}
        if (what := read.get(os.path.realpath(path))) is not None:
            raise ConfigError(f"{flag} {name!r} is {what}, and would be overwritten. Give another file, as in {example}.")
        return Path(path)
    raise ConfigError(f"{flag} {name!r} {why}. Give a writable file, as in {example}.")


def _can_write(path: Path) -> bool:
    try:
        check_writable(path)
    except OSError:
        return False
    return True


def say_why_no_folder(name: str) -> str:
    """Return why `name` is not a folder, as the end of a sentence."""
    return "is not a folder" if os.path.exists(name) else "does not exist"
