"""The command line: one command a file, nothing heavy imported before a command runs.

Exit codes: 0 all went well, 1 a comparison found a difference, 2 a flag, file or model cannot be what it is, 130 Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import fgoffload
from fgoffload.cli import train
from fgoffload.cli.interrupt import end_soon_after_interrupt
from fgoffload.errors import ConfigError, OffloadError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells use

__all__ = ["EXIT_ERROR", "EXIT_INTERRUPTED", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return the exit code.

    Args:
        argv: Without the program's name. None takes those of the process, and then Ctrl-C ends the process here.
    """
    try:
        with end_soon_after_interrupt(EXIT_INTERRUPTED):
            options, megatron_flags = _build_parser().parse_known_args(argv)
            return train.run(options, megatron_flags)
    except OffloadError as error:
        _print_error(f"error: {error}")
        return EXIT_ERROR
    except KeyboardInterrupt:
        _print_error("interrupted")
        if argv is None:
            # At once: taking torch down in order can take longer than a user who pressed Ctrl-C waits, and nothing is open.
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others of this program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def _build_parser() -> argparse.ArgumentParser:
    # Abbreviations would take Megatron flags for ours: `--data` is a beginning of `--data-path`.
    parser = _Parser(
        prog="fgoffload", description="Fine-grained activation offload for Megatron-style training.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fgoffload {fgoffload.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    train.add_arguments(
        commands.add_parser(
            train.NAME, help=train.SUMMARY, description=train.DESCRIPTION, usage=train.USAGE, allow_abbrev=False
        )
    )
    return parser


def _print_error(message: str) -> None:
    one_line = " ".join(line.strip() for line in message.splitlines())
    print(f"fgoffload: {one_line}", file=sys.stderr, flush=True)
