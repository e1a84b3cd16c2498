"""What a module of this package offers to be a command of the program."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Protocol


class Command(Protocol):
    """A module with these names. Importing it loads nothing heavy: every start of the program imports all commands."""

    NAME: str
    SUMMARY: str
    """For `fgoffload --help`."""
    DESCRIPTION: str
    """For its own `--help`, which begins with it."""
    USAGE: str
    """In lines that, after `usage: `, fit 80 columns: argparse does not break it."""
    EXAMPLE: str
    """A whole command line, for the help and for errors."""
    NOTES: str
    """What its own `--help` says last."""
    EXAMPLE_VALUES: Mapping[str, str]
    """A value for each of its own flags, for errors."""
    RUNS_A_SCRIPT: bool
    """Whether it runs the user's script: then it parses all words after its name itself, and leaves Ctrl-C to the script."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this command to `parser`."""

    def run(self, options: argparse.Namespace, words: Sequence[str]) -> int:
        """Do what the command is for, and return the exit code.

        Args:
            options: What the parser found.
            words: What the parser does not know; all words where `RUNS_A_SCRIPT`.
        """
