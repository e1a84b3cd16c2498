"""`fgoffload doctor`: checks the machine for problems that make offload slow, wrong or impossible."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fgoffload.cli.options import suggest
from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.doctor import CheckResult

NAME = "doctor"
SUMMARY = "check your machine"
DESCRIPTION = (
    "Checks versions, GPUs, links, copy rates, host memory, CPUs, environment variables and attention kernels for problems "
    "that make offload slow, wrong or impossible. Each row is ok, warning, error or skipped, with the fix. The exit code is 1 "
    "if a row is an error."
)
USAGE = "fgoffload doctor [--json]"
EXAMPLE = "fgoffload doctor"
NOTES = ""
EXAMPLE_VALUES: Mapping[str, str] = {}
RUNS_A_SCRIPT = False
EXIT_WELL, EXIT_ERRORS = 0, 1

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the checks, show the rows, and return 1 if a row is an error."""
    if words:
        raise ConfigError(f"unknown option {words[0]!r}.{suggest(words[0], ('--json',))} Usage: {USAGE}.")
    from fgoffload.doctor import Machine, Status, check_machine

    results = list(check_machine(Machine()))
    has_error = any(result.status is Status.ERROR for result in results)
    if options.json:
        print(to_json(results))
    else:
        _show_table(results)
    return EXIT_ERRORS if has_error else EXIT_WELL


def to_json(results: "Sequence[CheckResult]") -> str:
    """Return the rows as JSON text."""
    rows = [{**dataclasses.asdict(result), "status": result.status.value} for result in results]
    return json.dumps({"checks": rows}, indent=2)


def _show_table(results: "Sequence[CheckResult]") -> None:
    from rich.table import Table
    from rich.text import Text

    from fgoffload.cli.console import PipeConsole

    table = Table(show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # keep paths whole, so that they can be copied
    for result in results:
        status = result.status.value
        # As Text, since brackets in a path or message are not markup.
        said = Text(result.found)
        if result.fix:
            said.append(f"\nfix: {result.fix}", style=_STYLES[status])
        table.add_row(Text(result.name), Text(status, style=_STYLES[status]), said)
    PipeConsole().print(table)
