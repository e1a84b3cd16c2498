"""The protocol of a command's module."""

import argparse
from collections.abc import Sequence
from typing import Protocol


class Command(Protocol):
    """A module with these names. It must import nothing heavy: the program imports all commands at start."""

    NAME: str
    SUMMARY: str
    """One line for `fgoffload --help`."""
    DESCRIPTION: str
    """First paragraph of the command's `--help`."""
    USAGE: str
    EXAMPLE: str
    """A complete command line, for the help and for errors."""
    NOTES: str
    """Last paragraphs of the command's `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this command to `parser`."""

    def run(self, options: argparse.Namespace, words: Sequence[str]) -> int:
        """Run the command and return the exit code.

        Args:
            options: The parsed options, with the command's flags as `own_flags`.
            words: Words that the parser does not know. For `run`, all words after its name.
        """
