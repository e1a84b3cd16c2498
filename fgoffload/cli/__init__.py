"""The command line: one command a file, nothing heavy imported before a command runs.

Exit codes: 0 all went well, 1 a comparison found a difference, 2 a flag, file or model cannot be what it is, 130 Ctrl-C, 141
nobody reads the output any more.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

import fgoffload
from fgoffload.cli import train
from fgoffload.cli.errors import show_error, show_line
from fgoffload.cli.interrupt import end_soon_after_interrupt
from fgoffload.cli.streams import LibraryLog, drop_unread_output, flush_at_end
from fgoffload.errors import ConfigError, OffloadError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells use
EXIT_UNREAD = 141  # 128 + SIGPIPE

__all__ = ["EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_UNREAD", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return the exit code.

    Args:
        argv: Without the program's name. None takes those of the process, and then Ctrl-C ends the process here.
    """
    log = LibraryLog()
    try:
        with flush_at_end():
            try:
                with end_soon_after_interrupt(EXIT_INTERRUPTED, on_interrupt=log.silence), log.attached():
                    return _run(argv)
            except OffloadError as error:
                show_error(error)
                return EXIT_ERROR
    except BrokenPipeError:
        drop_unread_output()
        return EXIT_UNREAD
    except KeyboardInterrupt:
        show_line("interrupted")
        if argv is None:
            # At once: taking torch down in order can take longer than a user who pressed Ctrl-C waits, and nothing is open.
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    options, megatron_flags = _build_parser().parse_known_args(argv)
    if options.command is None:
        raise ConfigError(f"COMMAND is missing. Give one, as in: {train.EXAMPLE}.")
    return train.run(options, megatron_flags)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others of this program."""

    def error(self, message: str) -> NoReturn:
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        if rest.startswith("expected"):
            raise ConfigError(f"{flag} {rest}. Give it after the flag, as in {flag} {train.EXAMPLE_VALUES.get(flag, 'VALUE')}.")
        if match := re.match(r"invalid choice: ('.*?') \(choose from", rest):
            raise ConfigError(f"{flag} {match[1]} is not one of: {train.NAME}. Give one, as in: {train.EXAMPLE}.")
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def _build_parser() -> argparse.ArgumentParser:
    # Abbreviations would take Megatron flags for ours: `--data` is a beginning of `--data-path`.
    parser = _Parser(
        prog="fgoffload", description="Fine-grained activation offload for Megatron-style training.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fgoffload {fgoffload.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    train.add_arguments(
        commands.add_parser(
            train.NAME, help=train.SUMMARY, description=train.DESCRIPTION, usage=train.USAGE, allow_abbrev=False
        )
    )
    return parser
