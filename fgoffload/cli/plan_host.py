"""The options `--launch-bound` and `--not-launch-bound` of `fgoffload plan`."""

import argparse
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.planner.late_host import HostGuess


def check_host_of_link(host: "HostGuess | None") -> None:
    """Refuse `--not-launch-bound` beside a profile of the link alone, which says nothing about launches.

    Raises:
        ConfigError: With the fix.
    """
    from fgoffload.planner.late_host import HostGuess

    if host is HostGuess.IN_TIME:
        raise ConfigError("--not-launch-bound is the default with a profile of the link alone. Leave it out.")


def find_host(options: argparse.Namespace) -> "HostGuess | None":
    """Return the host that `--launch-bound` or `--not-launch-bound` asks for, or None without them.

    Raises:
        ConfigError: Both were given, or the latter without a profile, where it has no effect.
    """
    if options.not_launch_bound and options.launch_bound:
        raise ConfigError("--launch-bound and --not-launch-bound exclude each other. Give one of them.")
    if options.not_launch_bound and options.profile is None:
        raise ConfigError("--not-launch-bound is the default with a device of the table. Leave it out, or give --profile FILE.")
    if not (options.not_launch_bound or options.launch_bound):
        return None
    from fgoffload.planner.late_host import HostGuess

    return HostGuess.LATE if options.launch_bound else HostGuess.IN_TIME
