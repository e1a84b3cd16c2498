"""Parses options that several commands share."""

import argparse
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fgoffload.cli.shipped_models import find_model, list_models
from fgoffload.errors import ConfigError
from fgoffload.output_files import check_writable
from fgoffload.units import parse_bytes

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
DATA_HELP = "text file or folder (default: Python's standard library)"


def add_argument_file(parser: argparse.ArgumentParser, *, meaning: str = "") -> None:
    """Add the argument file to `parser`. It is optional, since `check_argument_file` reports a missing file more clearly."""
    meaning = meaning or "a Megatron argument file, or a name from `fgoffload plan --list`"
    parser.add_argument("arguments_file", metavar="ARGUMENTS.sh", nargs="?", help=meaning)


def suggest(word: str, known: Collection[str]) -> str:
    """Return a hint such as ` Did you mean --json?` with the most similar of `known`, or an empty string."""
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


def suggest_file(name: str) -> str:
    """Return a hint such as ` Did you mean train.sh?` with the most similar file in the same folder, or an empty string."""
    folder, base = os.path.split(name)
    is_missing = os.path.isdir(folder or ".") and not os.path.exists(name)
    return suggest(base, os.listdir(folder or ".")) if is_missing else ""


def suggest_model(name: str) -> str:
    """Return a hint with the most similar shipped model or, if `name` is a path, the most similar file."""
    if not name.isidentifier():
        return suggest_file(name)
    hint = suggest(name, [path.stem for path in list_models()])
    return f"{hint} `fgoffload plan --list` shows the models that come with fgoffload."


def check_argument_file(options: argparse.Namespace, flags: Sequence[str], *, example: str) -> Path:
    """Return the path of the argument file in `options`, which can name a shipped model instead.

    Errors show the command line `example`. If the first unrecognized word in `flags` is misspelled, they suggest a fix.
    """
    name = options.arguments_file
    hint = suggest(flags[0], options.own_flags) if flags else ""
    if not name:
        raise ConfigError(f"ARGUMENTS.sh is missing. Pass a Megatron argument file first, for example: {example}.{hint}")
    # Path.is_file would raise on a name that is too long.
    if not os.path.isfile(name):
        if (shipped := find_model(name)) is not None:
            return shipped
        hint = hint or suggest_model(name)
        raise ConfigError(f"argument file {name!r} {explain_unusable_file(name)}.{hint} Pass a file before any Megatron flag.")
    if name.endswith(".json"):
        raise ConfigError(
            f"argument file {name!r} is JSON, but a training run needs Megatron's flags. Pass a Megatron argument file, for "
            f"example: {example}. To plan for a Hugging Face config.json: fgoffload plan {name} --gpu h100."
        )
    return Path(name)


def read_count(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    # int() alone accepts ` 1_0 `, and raises a different error for thousands of digits.
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number. Use 1 or more.")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1. Use 1 or more.")
    return int(text)


def read_size(text: str) -> int:
    """Parse a size with a unit, for argparse."""
    try:
        return parse_bytes(text, name="", needs_unit=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from error


def read_path(text: str) -> Path:
    """Return a path with `~` expanded, for argparse."""
    return Path(os.path.expanduser(text))


def explain_unusable_file(name: str) -> str:
    """Return why `name` is not a regular file, as the end of a sentence."""
    if os.path.isdir(name):
        return "is a folder"
    return "is not a regular file" if os.path.exists(name) else "does not exist"


def check_output_file(name: str, *, flag: str, inputs: Mapping[str, str | os.PathLike[str] | None]) -> Path:
    """Check an output file before the work starts, and return its path.

    `inputs` are input files that must not be overwritten, keyed by description. None means that no file is given.
    """
    if flag == "--plot" and not name.lower().endswith(PLOT_SUFFIXES):
        raise ConfigError(f"--plot {name!r} has an unsupported image format. Use one of {', '.join(PLOT_SUFFIXES)}.")
    path = os.path.expanduser(name)
    for description, given in inputs.items():
        if given is not None and os.path.realpath(os.path.expanduser(given)) == os.path.realpath(path):
            raise ConfigError(f"{flag} {name!r} is {description}, and would be overwritten. Use another file.")
    try:
        check_writable(Path(path))
    except OSError as error:
        raise ConfigError(
            f"{flag} {name!r} cannot be written: {error.strerror}. Use a writable file in an existing folder."
        ) from error
    return Path(path)
