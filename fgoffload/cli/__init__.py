"""The command-line interface. Each command is a module that imports heavy packages only when it runs.

An invalid flag or file raises an `OffloadError`, usually a `ConfigError`, which `main` shows on one line.

Exit codes: 0 for success, 1 if a comparison finds a difference, a check finds an error or all benchmark settings fail, 2 for an
invalid flag, file or model, 130 for Ctrl-C, 141 for a closed output pipe. `fgoffload run` returns the exit code of its script.
"""

import argparse
import errno
import logging
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
from fgoffload.cli.options import suggest
from fgoffload.cli.streams import LibraryLog, drop_unread_output, flush_at_end
from fgoffload.errors import ConfigError, OffloadError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_UNREAD = 141  # 128 + SIGPIPE

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
"""Packages whose versions `--version` shows."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

COMMANDS: tuple[Command, ...] = (train, run, plan, profile, bench, doctor, completion)
"""All commands, in the order in which `fgoffload --help` lists them."""

__all__ = ["COMMANDS", "EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_UNREAD", "format_helps", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. If `argv` is None, use `sys.argv`, and end the process on Ctrl-C."""
    log = LibraryLog()
    try:
        with flush_at_end():
            try:
                return _run(sys.argv[1:] if argv is None else argv, log)
            except OffloadError as error:
                show_error(error)
                return EXIT_ERROR
    except BrokenPipeError:
        drop_unread_output()
        return EXIT_UNREAD
    except OSError as error:
        # An error with a file name did not come from writing to stdout or stderr.
        if error.errno not in _FULL or error.filename is not None:
            raise
        full = ConfigError(f"the output cannot be written: {error.strerror}. Free disk space or redirect the output.")
        full.__cause__ = error
        show_error(full)
        drop_unread_output()
        return EXIT_ERROR
    except KeyboardInterrupt:
        show_line("interrupted")
        if argv is None:
            # Exit now: shutting torch down takes seconds, and no file is open.
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _run(words: Sequence[str], log: LibraryLog) -> int:
    command, options, rest = _parse(words)
    if os.environ.get("RANK", "0") != "0":
        log.setLevel(logging.CRITICAL)  # rank 0 shows warnings for all ranks; each rank shows its own errors
    with log.attached():
        return command.run(options, rest)


def _parse(words: Sequence[str]) -> tuple[Command, argparse.Namespace, Sequence[str]]:
    """Return the command in `words`, its parsed options, and the remaining words."""
    parser, _ = _build_parsers()
    if list(words[:1]) == ["help"]:
        words = [*(word for word in words[1:] if word != "help"), "--help"]
    if list(words[:1]) == [run.NAME] and words[1:2] not in (["-h"], ["--help"]):
        # Parse only the command, since argparse would also parse the script's arguments.
        return run, parser.parse_args(words[:1]), words[1:]
    options, rest = parser.parse_known_args(words)
    hint = suggest(rest[0], ("--help", "--version")) if rest else ""
    if hint:
        raise ConfigError(f"unknown option {rest[0]!r}.{hint}")
    for command in COMMANDS:
        if options.command == command.NAME:
            return command, options, rest
    names = ", ".join(command.NAME for command in COMMANDS)
    raise ConfigError(f"COMMAND is missing. Use one of: {names}. For example: {train.EXAMPLE}. See `fgoffload --help`.")


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, but keeps the line breaks of examples and lists, which are indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n\n".join(one if "\n  " in one else wrap(one, width, indent) for one in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigError` with a one-line message."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # parse -5GiB as a value, not as a flag

    def list_flags(self) -> list[str]:
        """Return the long names of all flags."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def error(self, message: str) -> NoReturn:
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        if rest.startswith("expected"):
            raise ConfigError(f"{flag} {rest}. Use {flag} {self._option_string_actions[flag].metavar}.")
        if (match := re.match(r"invalid choice: ('.*?') \(choose from", rest)) and flag == "COMMAND":
            names = [command.NAME for command in COMMANDS]
            hint = suggest(match[1].strip("'"), names)
            raise ConfigError(f"{flag} {match[1]} is not one of: {', '.join(names)}.{hint} For example: {train.EXAMPLE}.")
        if rest.startswith("not allowed with argument "):
            raise ConfigError(f"{flag} and {rest.rpartition(' ')[2]} are mutually exclusive. Use only one of them.")
        if rest.endswith("."):  # raised by a flag's type function, such as `read_size`
            raise ConfigError(f"{flag} {rest}")
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


class _ShowVersions(argparse.Action):
    """Prints the version of each package, for bug reports."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        from fgoffload.doctor import Machine

        print(f"fgoffload {fgoffload.__version__}")
        print(f"Python {platform.python_version()}")
        for distribution in _PACKAGES:
            print(distribution, Machine().find_version(distribution) or "not installed")
        parser.exit()


def format_helps() -> dict[str, str]:
    """Return the help message of each command, keyed by name, in the order of `COMMANDS`."""
    _, parsers = _build_parsers()
    return {name: parser.format_help() for name, parser in parsers.items()}


def _build_parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the main parser, and the parsers of the commands, keyed by name."""
    # Unknown flags are Megatron's, so do not expand abbreviations of our flags, such as `--dat` for `--data`.
    parser = _Parser(
        prog="fgoffload",
        description="Fine-grained activation offload for Megatron, Hugging Face and PyTorch.",
        epilog="`fgoffload help COMMAND` shows a command's flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersions, nargs=0, help="show the versions of fgoffload and related packages")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    parsers: dict[str, _Parser] = {}
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
        parsers[command.NAME].set_defaults(own_flags=parsers[command.NAME].list_flags())
    parsers[completion.NAME].set_defaults(flags={name: parser.list_flags() for name, parser in parsers.items()})
    return parser, parsers
