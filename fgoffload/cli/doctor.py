"""`fgoffload doctor`: checks the machine for problems that make offload slow, wrong or impossible."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fgoffload.cli.options import suggest
from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.doctor import CheckResult

NAME = "doctor"
SUMMARY = "check your machine"
DESCRIPTION = (
    "Checks versions, GPUs, links, copy rates, host memory, CPUs, environment variables and attention kernels for problems "
    "that make offload slow, wrong or impossible. Each result is ok, warning, error or skipped. Each problem comes with a fix. "
    "The exit code is 1 if there is an error."
)
USAGE = "fgoffload doctor [--json]"
EXAMPLE = "fgoffload doctor"
NOTES = ""
EXIT_OK, EXIT_ERRORS = 0, 1

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the checks, show the results, and return 1 if any is an error."""
    if words:
        raise ConfigError(f"unknown option {words[0]!r}.{suggest(words[0], options.own_flags)} Usage: {USAGE}.")
    from fgoffload.doctor import Machine, Status, check_machine

    results = list(check_machine(Machine()))
    has_error = any(result.status is Status.ERROR for result in results)
    if options.json:
        rows = [{**dataclasses.asdict(result), "status": result.status.value} for result in results]
        print(json.dumps({"checks": rows}, indent=2))
    else:
        _show_table(results)
    return EXIT_ERRORS if has_error else EXIT_OK


def _show_table(results: "Sequence[CheckResult]") -> None:
    from rich.table import Table
    from rich.text import Text

    from fgoffload.cli.console import PipeConsole

    table = Table(show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # do not shorten paths
    for result in results:
        status = result.status.value
        # In a plain string, rich would interpret brackets in a path or message as markup.
        found = Text(result.found)
        if result.fix:
            found.append(f"\nfix: {result.fix}", style=_STYLES[status])
        table.add_row(Text(result.name), Text(status, style=_STYLES[status]), found)
    PipeConsole().print(table)
