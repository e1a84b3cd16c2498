"""The protocol of a command's module."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Protocol


class Command(Protocol):
    """A module with these names. It must import nothing heavy: every start of the program imports all commands."""

    NAME: str
    SUMMARY: str
    """Text for `fgoffload --help`."""
    DESCRIPTION: str
    """First text of its own `--help`."""
    USAGE: str
    """Lines that fit 80 columns after `usage: `; argparse does not wrap them."""
    EXAMPLE: str
    """A whole command line, for the help and for errors."""
    NOTES: str
    """Last text of its own `--help`."""
    EXAMPLE_VALUES: Mapping[str, str]
    """Example values of its own flags, for errors."""
    RUNS_A_SCRIPT: bool
    """Whether it runs the user's script: then it parses all words after its name itself, and leaves Ctrl-C to the script."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this command to `parser`."""

    def run(self, options: argparse.Namespace, words: Sequence[str]) -> int:
        """Run the command and return the exit code.

        Args:
            options: The parsed options.
            words: Words that the parser does not know; all words if `RUNS_A_SCRIPT`.
        """
