"""Checks a machine for problems that make offload slow, wrong or impossible.

    for result in check_machine(Machine()):
        print(result.name, result.status.value, result.found, result.fix)

Each check is a function that reads a `Machine` and returns results. Checks never change the machine.
"""

from collections.abc import Iterator

from fgoffload.doctor.attention import check_attention
from fgoffload.doctor.gpus import check_gpus, find_gpus
from fgoffload.doctor.host import check_host
from fgoffload.doctor.machine import CommandResult, Machine
from fgoffload.doctor.result import CheckResult, Status
from fgoffload.doctor.versions import check_environment, check_versions

__all__ = ["CheckResult", "CommandResult", "Machine", "Status", "check_machine"]


def check_machine(machine: Machine) -> Iterator[CheckResult]:
    """Run all checks, and yield each result as soon as its check ends."""
    yield from check_versions(machine)
    gpus, reason = find_gpus(machine)
    yield from check_gpus(machine, gpus, reason)
    yield from check_host(machine, gpus, reason)
    yield from check_environment(machine.environment)
    yield from check_attention(machine, "" if machine.count_gpus() else reason)
