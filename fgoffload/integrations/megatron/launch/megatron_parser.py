"""Queries Megatron-LM's own parser for its flags, since they differ between versions.

Megatron-LM is beside its scripts, so its parser is found where the script would find it. A script without Megatron-LM has a
parser of its own, which cannot be queried before the script runs. Since 0.18, wheels of megatron-core include
`megatron.training`. A script need not use it, so the parser of an installed wheel is not queried.
"""

import argparse
import contextlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_MODULE = "megatron.training.arguments"


class MegatronParser:
    """Megatron-LM's parser, with all flags of its scripts."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def knows(self, flag: str) -> bool:
        """Return whether the parser accepts `flag`."""
        return flag in self._parser._option_string_actions  # noqa: SLF001 - argparse has no public name for it

    def find_values(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the values of all flags, or None if the parser rejects `words`, which the script will report itself."""
        silence = io.StringIO()
        with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            try:
                return self._parser.parse_known_args(list(words))[0]
            # Some of its types raise errors that argparse does not turn into an exit, such as KeyError.
            except (SystemExit, AssertionError, LookupError, TypeError, ValueError):
                return None


class _ParserIsComplete(BaseException):
    """Ends Megatron-LM's `parse_args` before it parses. Not an `Exception`, so that no handler catches it as an error."""


def _is_of_wheel() -> bool:
    """Return whether `megatron.training` is beside the metadata that pip writes for an installed wheel."""
    try:
        spec = importlib.util.find_spec(_MODULE.rpartition(".")[0])
    except (ImportError, ValueError):  # Megatron is missing, or is a module created by hand
        return False
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).parents[1].glob("megatron_core-*.dist-info")) for folder in folders)


def find_megatron_parser() -> MegatronParser | None:
    """Return the parser of the Megatron-LM that the script will import, or None if there is none to query.

    Importing it imports Megatron-LM's training code, as the script will do anyway.
    """
    if _is_of_wheel():
        return None
    try:
        module = load_module(_MODULE)
    except (ImportError, IntegrationError):
        return None  # if the script needs it, the script reports that it is missing
    parse_args: Any = getattr(module, "parse_args", None)
    found: list[argparse.ArgumentParser] = []

    # In every version since 2, Megatron-LM passes the complete parser to the script's `extra_args_provider`, and then parses.
    def take_parser(parser: argparse.ArgumentParser) -> NoReturn:
        found.append(parser)
        raise _ParserIsComplete

    if parse_args is None:
        return None
    with contextlib.suppress(_ParserIsComplete):
        parse_args(extra_args_provider=take_parser)
    return MegatronParser(found[0]) if found else None
