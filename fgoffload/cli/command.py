"""Interface of the modules that implement commands."""

import argparse
from collections.abc import Sequence
from typing import Protocol


class Command(Protocol):
    """A command's module. It must not import heavy packages at the top, since `fgoffload` imports all command modules."""

    NAME: str
    SUMMARY: str
    """One line for `fgoffload --help`."""
    DESCRIPTION: str
    """Text at the top of the command's `--help`."""
    USAGE: str
    EXAMPLE: str
    """Example command line for the help and for errors."""
    NOTES: str
    """Text at the end of the command's `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this command to `parser`."""

    def run(self, options: argparse.Namespace, words: Sequence[str]) -> int:
        """Run the command and return the exit code.

        `options.own_flags` are the command's flags. `words` are the arguments that the parser does not recognize. For
        `fgoffload run`, they are all arguments after `run`.
        """
