"""Computes the default host budget of a rank.

The tightest memory limit of a process's control group (cgroup) and its ancestors applies. A container sees only its own part of
the cgroup tree. Both cgroup versions may be mounted at the same time.
"""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from fgoffload.engine.host_arena import HostBudget
from fgoffload.errors import ConfigError
from fgoffload.transfer_config import HOST_SHARE as HOST_SHARE
from fgoffload.units import GIB

RANKS_PER_NODE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Variables that torchrun, Open MPI and Slurm set. The first one found applies: a Slurm task may be a torchrun agent."""

_NO_LIMIT = 1 << 62

_process_budgets: weakref.WeakValueDictionary[int, HostBudget] = weakref.WeakValueDictionary()
"""Budgets keyed by process ID, because a forked process needs its own."""


def get_process_budget() -> HostBudget:
    """Return the budget that all engines of this process share. If no engine exists, compute a new budget."""
    process = os.getpid()
    budget = _process_budgets.get(process)
    if budget is None:
        budget = _process_budgets[process] = HostBudget(get_default_budget_bytes())
    return budget


def get_default_budget_bytes(*, root: Path = Path("/")) -> int:
    """Return this rank's share of the free host memory, within the limits of its control groups.

    If none of `RANKS_PER_NODE_VARIABLES` is set, the rank is assumed to be alone on its node. `root` contains `proc` and `sys`.

    Raises:
        ConfigError: One of the variables is not a number of ranks.
    """
    free_bytes = min(_read_available_bytes(root), _read_cgroup_free_bytes(root))
    return int(free_bytes * HOST_SHARE / _read_ranks_per_node())


def _read_ranks_per_node() -> int:
    for name in RANKS_PER_NODE_VARIABLES:
        text = os.environ.get(name)
        if text is not None:
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise ConfigError(
                    f"The environment variable {name}={text!r} is not a number of ranks per node, by which fgoffload divides "
                    "the host memory. Set it to 1 or more, unset it, or use --offload-host-budget."
                )
            return int(text)
    return 1


def _read_available_bytes(root: Path) -> int:
    for name, kib in _read_table(root / "proc/meminfo"):
        if name == "MemAvailable:":
            return kib * 1024
    return 16 * GIB  # not Linux


def _read_cgroup_free_bytes(root: Path) -> int:
    free_bytes = _NO_LIMIT
    for kind, mount, group in _list_own_groups(root):
        # The mount may start at any ancestor of the group, so we try each suffix of the group's path below the mount. If none
        # exists, we read the mount itself.
        names = [] if ".." in group.parts else group.parts[1:]
        paths = (mount.joinpath(*names[first:]) for first in range(len(names)))
        own = next((path for path in paths if path.is_dir()), mount)
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                free_bytes = min(free_bytes, _read_free_bytes(folder, kind))
    return free_bytes


def _read_free_bytes(folder: Path, kind: str) -> int:
    """Return the free bytes of one control group.

    Inactive file cache is counted as free, because the kernel reclaims it first and data loaders create a lot of it.
    """
    if kind == "cgroup2":
        # Above `memory.high`, the kernel throttles the group to reclaim memory, but it cannot reclaim pinned memory.
        limits, usage, cache = ["memory.max", "memory.high"], "memory.current", "inactive_file"
    else:
        limits, usage, cache = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_inactive_file"
    limit = min((value for name in limits for value in _read_numbers(folder / name)), default=_NO_LIMIT)
    used = max(_read_numbers(folder / usage), default=0)
    used -= min(used, dict(_read_table(folder / "memory.stat")).get(cache, 0))
    return max(0, limit - used)


def _list_own_groups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the version, possible mount point and path of each control group that may limit this process's memory."""
    mounts = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "cgroup2", mounts, Path(path)
            yield "cgroup2", mounts / "unified", Path(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", mounts / "memory", Path(path)


def _read_table(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number at the start of each line that has both."""
    for line in _read_lines(path):
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            yield words[0], int(words[1])


def _read_numbers(path: Path) -> list[int]:
    """Return the number in a file, or an empty list if the file contains `max` or is missing."""
    return [int(text) for text in _read_lines(path) if text.isdigit()]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # not Linux, or a control group without this file
