"""The command line. Each command has a file; heavy imports wait until it runs.

Exit codes: 0 success, 1 a comparison found a difference or a check an error, 2 a wrong flag, file or model, 130 Ctrl-C, 141 a
closed output pipe. `fgoffload run` returns its script's exit code.
"""

import argparse
import contextlib
import errno
import gc
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import fgoffload
from fgoffload.cli import bench, completion, doctor, plan, profile, run, train
from fgoffload.cli.command import Command
from fgoffload.cli.errors import show_error, show_line
from fgoffload.cli.interrupt import end_soon_after_interrupt
from fgoffload.cli.options import suggest
from fgoffload.cli.streams import LibraryLog, drop_unread_output, flush_at_end
from fgoffload.errors import ConfigError, OffloadError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells use
EXIT_UNREAD = 141  # 128 + SIGPIPE

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
"""Shown by `--version`: an integration depends on their versions."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

COMMANDS: tuple[Command, ...] = (train, run, plan, profile, bench, doctor, completion)
"""Commands in the order of the help."""

__all__ = ["COMMANDS", "EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_UNREAD", "format_helps", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return the exit code.

    Args:
        argv: Words after the program's name. None takes `sys.argv`; then Ctrl-C ends the process here.
    """
    log = LibraryLog()
    try:
        with flush_at_end():
            try:
                return _run(sys.argv[1:] if argv is None else argv, log, ends_process=argv is None)
            except OffloadError as error:
                show_error(error)
                return EXIT_ERROR
    except BrokenPipeError:
        drop_unread_output()
        return EXIT_UNREAD
    except OSError as error:
        # Errors of named files are handled elsewhere: this is stdout or stderr.
        if error.errno not in _FULL or error.filename is not None:
            raise
        full = ConfigError(f"the output cannot be written: {error.strerror}. Free space, or send it elsewhere.")
        full.__cause__ = error
        show_error(full)
        drop_unread_output()
        return EXIT_ERROR
    except KeyboardInterrupt:
        show_line("interrupted")
        if argv is None:
            # End at once: shutting torch down takes seconds, and no file is open.
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _run(words: Sequence[str], log: LibraryLog, *, ends_process: bool) -> int:
    command, options, rest = _parse(words)
    with contextlib.ExitStack() as around:
        if not command.RUNS_A_SCRIPT:
            around.enter_context(end_soon_after_interrupt(EXIT_INTERRUPTED))
            if ends_process:
                # Skip the garbage collection at exit: after a plan it took a third of a second.
                around.callback(gc.freeze)
        if os.environ.get("RANK", "0") != "0":
            log.silence()  # one rank's warnings hold for all; each rank shows its errors
        around.enter_context(log.attached())
        return command.run(options, rest)


def _parse(words: Sequence[str]) -> tuple[Command, argparse.Namespace, Sequence[str]]:
    """Return the command that `words` name, its options, and the remaining words."""
    parser, _ = _build_parsers()
    if list(words[:1]) == ["help"]:
        words = [*words[1:], "--help"]
    for command in COMMANDS:
        # argparse would search the script's own words for our options.
        if command.RUNS_A_SCRIPT and list(words[:1]) == [command.NAME] and words[1:2] not in (["-h"], ["--help"]):
            return command, parser.parse_args(words[:1]), words[1:]
    options, rest = parser.parse_known_args(words)
    meant = suggest(rest[0], ("--help", "--version")) if rest else ""
    if meant:
        raise ConfigError(f"unknown option {rest[0]!r}.{meant}")
    for command in COMMANDS:
        if options.command == command.NAME:
            return command, options, rest
    raise ConfigError(f"COMMAND is missing. Give one, as in: {train.EXAMPLE}.")


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, and keeps those with indented lines as they are: examples and lists."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n\n".join(one if "\n  " in one else wrap(one, width, indent) for one in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    """A parser that raises our one-line errors."""

    def error(self, message: str) -> NoReturn:
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        if rest.startswith("expected"):
            # Commands share flag names with different values.
            of_command = (command.EXAMPLE_VALUES for command in COMMANDS if self.prog.endswith(f" {command.NAME}"))
            values = next(of_command, {})
            raise ConfigError(f"{flag} {rest}. Give it after the flag, as in {flag} {values.get(flag, 'VALUE')}.")
        if match := re.match(r"invalid choice: ('.*?') \(choose from", rest):
            names = ", ".join(command.NAME for command in COMMANDS)
            meant = suggest(match[1].strip("'"), [command.NAME for command in COMMANDS])
            raise ConfigError(f"{flag} {match[1]} is not one of: {names}.{meant} Give one, as in: {train.EXAMPLE}.")
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


class _ShowVersions(argparse.Action):
    """`--version`: prints one line for each package, for bug reports."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        from fgoffload.doctor import Machine

        print(f"fgoffload {fgoffload.__version__}")
        print(f"Python {platform.python_version()}")
        for distribution in _PACKAGES:
            print(distribution, Machine().find_version(distribution) or "not installed")
        parser.exit()


def format_helps() -> dict[str, str]:
    """Return the text of `--help` by command, in the order of `COMMANDS`."""
    _, parsers = _build_parsers()
    return {name: parser.format_help() for name, parser in parsers.items()}


def _build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the program, and those of the commands by name."""
    # With abbreviations, `--data` would also match Megatron's `--data-path`.
    parser = _Parser(
        prog="fgoffload",
        description="Fine-grained activation offload for Megatron-style training.",
        epilog="`fgoffload help COMMAND` shows the flags of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersions, nargs=0, help="show the versions of fgoffload, torch and others")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        parsers[command.NAME] = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            usage=command.USAGE,
            allow_abbrev=False,
            epilog=f"example:\n  {command.EXAMPLE}\n\n{command.NOTES}".strip(),
            formatter_class=_HelpFormatter,
        )
        command.add_arguments(parsers[command.NAME])
    parsers[completion.NAME].set_defaults(format_helps=format_helps)
    return parser, parsers
