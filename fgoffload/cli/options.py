"""What commands read of their own options alike."""

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fgoffload.cli.shipped_models import find_model, suggest_model
from fgoffload.errors import ConfigError
from fgoffload.output_files import check_writable


def suggest(word: str, known: Collection[str]) -> str:
    """Return the sentence ` Did you mean --json?` where one of `known` is near to `word`, or nothing."""
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


def check_argument_file(name: str | None, *, example: str, flags: Sequence[str] = (), own_flags: Collection[str] = ()) -> Path:
    """Return the path of an argument file.

    Args:
        name: As typed: a path, or the name of a shipped model; None where there is none.
        example: A whole command line.
        flags: Words that the command does not know: flags of Megatron, and their values.
        own_flags: Those of the command, to be suggested for one typed wrongly.

    Raises:
        ConfigError: It is missing, or no file, or one of another kind.
    """
    meant = suggest(flags[0], own_flags) if flags else ""
    if not name:
        raise ConfigError(f"ARGUMENTS.sh is missing. Give a Megatron argument file first, as in: {example}.{meant}")
    # os.path here and elsewhere: Path.is_file raises where a name is too long.
    if not os.path.isfile(name):
        if (shipped := find_model(name)) is not None:
            return shipped
        flag = None if name.endswith(".sh") or os.path.exists(name) else _find_flag_without_value(flags)
        if flag is not None:
            raise ConfigError(
                f"ARGUMENTS.sh is missing: {name!r} stands where it should. Give a Megatron argument file before {flag}, as in "
                f"{example} {flag} {name}.{meant}"
            )
        raise ConfigError(
            f"argument file {name!r} {say_why_no_file(name)}.{suggest_model(name)} Give a file, before any Megatron flag."
        )
    if name.endswith(".json"):
        raise ConfigError(
            f"argument file {name!r} is JSON, and a training is run by Megatron's flags. Give a Megatron argument file, as in: "
            f"{example}. A config.json of Hugging Face can be planned for: fgoffload plan {name} --gpu h100."
        )
    return Path(name)


def _find_flag_without_value(words: Sequence[str]) -> str | None:
    """Return the first flag of `words` behind which no value stands: it may have been taken for a file. None without any.

    A file there is no value: it stands where it should not either.
    """
    followed = zip(words, [*words[1:], "--"], strict=False)  # one longer where there are none
    flags = (word for word, after in followed if word.startswith("--") and (after.startswith("--") or os.path.isfile(after)))
    return next(flags, None)


def read_count(text: str, *, flag: str, example: int, hint: str = "") -> int:
    """Return the whole number from 1 that `text` is.

    Args:
        text: As typed.
        flag: That it was typed for.
        example: A number that would do.
        hint: What else to say where it is below 1.

    Raises:
        ConfigError: It is none.
    """
    # Not int() alone, which takes ` 1_0 ` too, and refuses thousands of digits in its own words.
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise ConfigError(f"{flag} {text!r} is not a whole number. Give one from 1, as in {example}.")
    count = int(text)
    if count < 1:
        raise ConfigError(f"{flag} {count} is below 1. Give 1 or more{hint}.")
    return count


def say_why_no_file(name: str) -> str:
    """Return why `name` is no regular file, as the end of a sentence."""
    if os.path.isdir(name):
        return "is a folder"
    return "is no regular file" if os.path.exists(name) else "does not exist"


def check_output_file(
    name: str | None, *, flag: str, example: str, inputs: Mapping[str, str | os.PathLike[str] | None]
) -> Path | None:
    """Return the path of a file that is to be written, or None where none is; before the work whose result it takes.

    Args:
        name: As typed.
        flag: That it was typed for.
        example: A name that would do.
        inputs: Files that are read, or None where one is not, by what they are: `--profile`. They are not written over.

    Raises:
        ConfigError: It cannot be written, or is one that is read.
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
        why = "may not be written"
    else:
        read = {os.path.realpath(os.path.expanduser(given)): what for what, given in inputs.items() if given is not None}
        if (what := read.get(os.path.realpath(path))) is not None:
            raise ConfigError(f"{flag} {name!r} is {what}, and would be written over. Give another file, as in {example}.")
        return Path(path)
    raise ConfigError(f"{flag} {name!r} {why}. Give a file that can be written, as in {example}.")


def _can_write(path: Path) -> bool:
    try:
        check_writable(path)
    except OSError:
        return False
    return True


def say_why_no_folder(name: str) -> str:
    """Return why `name` is no folder, as the end of a sentence."""
    return "is no folder" if os.path.exists(name) else "does not exist"
