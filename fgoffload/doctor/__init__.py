"""Checks a machine for what makes offload slow, wrong or impossible.

    for result in check_machine(Machine.here()):
        print(result.name, result.status.value, result.found, result.fix)

Each check is a function from a `Machine` to results, one topic a file. Checks read everything through `Machine`, so tests can
pass their own. Nothing here changes the machine.
"""

from fgoffload.doctor.checks import check_machine
from fgoffload.doctor.machine import CommandResult, Machine
from fgoffload.doctor.result import CheckResult, Status

__all__ = ["CheckResult", "CommandResult", "Machine", "Status", "check_machine"]
