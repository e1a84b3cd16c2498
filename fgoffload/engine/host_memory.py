"""How much host memory a rank may take when the user names no budget."""

import os
from pathlib import Path

from fgoffload.units import GIB

SHARE = 0.6
"""The part of the memory that is free at start that all ranks of a node together take at most. The rest is for data loaders,
checkpoints in the making and the page cache."""

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def get_default_budget_bytes() -> int:
    """Return this rank's share of the host memory that is free now, the control group's limit counted in.

    Ranks per node come from `LOCAL_WORLD_SIZE`, which torchrun sets; without it this process counts as alone.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(min(_read_available_bytes(), _read_cgroup_free_bytes()) * SHARE / ranks)


def _read_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no procfs: not Linux, fall through to a budget that every training host has
    return 16 * GIB


def _read_cgroup_free_bytes() -> int:
    for folder, limit_name, usage_name in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
        except OSError:
            continue  # this version of control groups is not mounted here
        if limit.isdigit():
            return max(0, int(limit) - usage)
    return 1 << 62  # no limit
