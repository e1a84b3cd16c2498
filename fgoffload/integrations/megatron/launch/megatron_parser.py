"""Asking Megatron-LM's own parser what it knows, since its flags differ between versions.

Megatron-LM lies beside its scripts: its parser is found where the script would find it. A script without one has a parser of
its own, that nobody can ask before the script runs. Since 0.18 wheels of megatron-core have `megatron.training` too, and a
script need not use it: an installed wheel's parser is not asked.
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
    """Megatron-LM's parser, with all flags that its scripts take."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def knows(self, flag: str) -> bool:
        """Return whether the parser accepts `flag`."""
        return flag in self._parser._option_string_actions  # noqa: SLF001 - argparse has no public name for it

    def find_values(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the values of all flags, or None where the parser refuses `words`, which the script will say itself."""
        silence = io.StringIO()
        with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            try:
                return self._parser.parse_known_args(list(words))[0]
            # Some of its types raise what argparse does not turn into an exit, KeyError for one.
            except (SystemExit, AssertionError, LookupError, TypeError, ValueError):
                return None


class _ParserIsComplete(BaseException):
    """Ends Megatron-LM's `parse_args` before it parses. No Exception, so that nothing on the way takes it for a fault."""


def _is_of_wheel() -> bool:
    """Return whether `megatron.training` lies beside what pip writes down of an installed wheel."""
    try:
        spec = importlib.util.find_spec(_MODULE.rpartition(".")[0])
    except (ImportError, ValueError):  # there is no Megatron at all, or a module that somebody made by hand
        return False
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).parents[1].glob("megatron_core-*.dist-info")) for folder in folders)


def find_megatron_parser() -> MegatronParser | None:
    """Return the parser of the Megatron-LM that the script will import, or None where there is none to ask.

    Importing it imports Megatron-LM's training code, as the script will do anyway.
    """
    if _is_of_wheel():
        return None
    try:
        module = load_module(_MODULE)
    except (ImportError, IntegrationError):
        return None  # if the script needs it, the script says what is missing
    parse_args: Any = getattr(module, "parse_args", None)
    found: list[argparse.ArgumentParser] = []

    # Megatron-LM hands the complete parser to the script's `extra_args_provider`, and then parses: in every version since 2.
    def take_parser(parser: argparse.ArgumentParser) -> NoReturn:
        found.append(parser)
        raise _ParserIsComplete

    if parse_args is None:
        return None
    with contextlib.suppress(_ParserIsComplete):
        parse_args(extra_args_provider=take_parser)
    return MegatronParser(found[0]) if found else None
