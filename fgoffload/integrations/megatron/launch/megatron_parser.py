"""Reads the values of Megatron-LM's flags with Megatron-LM's own parser, before the script starts.

Flags differ between versions, so this module uses the parser of the Megatron-LM next to the script. A script without
Megatron-LM may define its own parser, which exists only once the script runs. Since 0.18, wheels of megatron-core include
`megatron.training`. A script does not necessarily use that copy, so parsers from wheels are ignored.
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


class _ParserIsComplete(BaseException):
    """Ends Megatron-LM's `parse_args` before it parses. It is not an `Exception`, so error handlers do not catch it."""


def read_megatron_flags(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of all Megatron-LM flags, from `words` or defaults. Return None if no parser accepts `words`.

    The call imports Megatron-LM's `megatron.training.arguments` into this process.
    """
    parser = _find_parser()
    if parser is None:
        return None
    silence = io.StringIO()
    with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
        try:
            return vars(parser.parse_known_args(list(words))[0])
        # Some argument types raise errors that argparse does not handle, such as KeyError.
        except (SystemExit, AssertionError, LookupError, TypeError, ValueError):
            return None


def _find_parser() -> argparse.ArgumentParser | None:
    if _is_from_wheel():
        return None
    try:
        module = load_module(_MODULE)
    except (ImportError, IntegrationError):
        return None  # a script that needs the module fails at its own import
    parse_args: Any = getattr(module, "parse_args", None)
    found: list[argparse.ArgumentParser] = []

    # Since version 2, Megatron-LM calls the script's `extra_args_provider` with the complete parser before it parses.
    def take_parser(parser: argparse.ArgumentParser) -> NoReturn:
        found.append(parser)
        raise _ParserIsComplete

    if parse_args is None:
        return None
    with contextlib.suppress(_ParserIsComplete):
        parse_args(extra_args_provider=take_parser)
    return found[0] if found else None


def _is_from_wheel() -> bool:
    """Return whether `megatron.training` was installed from a wheel: pip's metadata is then next to the package."""
    try:
        spec = importlib.util.find_spec(_MODULE.rpartition(".")[0])
    except (ImportError, ValueError):  # Megatron is missing, or its module has no spec
        return False
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).parents[1].glob("megatron_core-*.dist-info")) for folder in folders)
