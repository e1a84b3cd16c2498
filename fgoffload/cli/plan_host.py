"""Which host `fgoffload plan` plans for, where its options say so."""

import argparse
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.planner.late_host import HostGuess


def check_host_of_link(host: "HostGuess | None") -> None:
    """Refuse a host in time beside a profile of the link alone, in which none was measured late.

    Raises:
        ConfigError: With the fix.
    """
    from fgoffload.planner.late_host import HostGuess

    if host is HostGuess.IN_TIME:
        raise ConfigError("--host-in-time is what a device with a profile of the link alone is taken for anyway. Leave it out.")


def find_host(options: argparse.Namespace) -> "HostGuess | None":
    """Return the host that `--late-host` or `--host-in-time` asks for, or None without them.

    Raises:
        ConfigError: Both were given, or the latter without a profile, and would do nothing.
    """
    if options.host_in_time and options.late_host:
        raise ConfigError("--late-host and --host-in-time exclude each other. Give one of them.")
    if options.host_in_time and options.profile is None:
        raise ConfigError(
            "--host-in-time is what a device of the table is taken for anyway. Leave it out, or give --profile FILE."
        )
    if not (options.host_in_time or options.late_host):
        return None
    from fgoffload.planner.late_host import HostGuess

    return HostGuess.LATE if options.late_host else HostGuess.IN_TIME
