"""Finds how many GPUs a launch script uses, from its launch command and its `#SBATCH` lines."""

import re
from collections.abc import Mapping, Sequence

Sizes = dict[str, int | None]
"""Numbers of `nodes`, processes `per_node`, `gpus` per node, and `total` processes. None means unknown."""

_HEADER = re.compile(r"^#SBATCH\s+([^#\n]*)", re.MULTILINE)
_TORCHRUN = re.compile(r"(.*/)?(torchrun|fgoffload)|torch\.distributed\.(run|launch)")
_OPTIONS: Mapping[str, Sequence[str]] = {
    "nodes": ("nodes", "nnodes", "N", "num_nodes"),
    "per_node": ("nproc_per_node", "ntasks_per_node", "num_gpus"),
    "gpus": ("gpus_per_node", "gres"),
    "total": ("ntasks", "n", "np", "num_processes"),
}
_VARIABLES: Mapping[str, Sequence[str]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "total": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def read_header(text: str) -> tuple[Sizes, dict[str, str]]:
    """Return the sizes in the `#SBATCH` lines of a script, and the variables that SLURM sets from them."""
    sizes = _read_sizes(" ".join(_HEADER.findall(text)).split())
    sizes.setdefault("total", _multiply(sizes.get("nodes"), sizes.get("per_node")))
    return sizes, {name: str(size) for key, size in sizes.items() if size is not None for name in _VARIABLES[key]}


def count_gpus(launch: Sequence[str], header: Sizes) -> int | None:
    """Return the number of GPUs that a script uses (one per process), or None if unknown.

    `launch` contains the words before the Python script in the launch command, if any. `header` comes from `read_header`.
    """
    begin = next((place for place, word in enumerate(launch) if _TORCHRUN.fullmatch(word)), None)
    sizes = _read_sizes(launch[begin or 0 :])
    if begin is not None:
        total = _multiply(sizes.get("nodes", 1), sizes.get("per_node", 1))
    else:
        sizes = {**header, "total": None, **sizes} if launch else {}
        total = sizes.get("total") or _multiply(sizes.get("nodes"), sizes.get("per_node"))
    return total or _multiply(header.get("nodes"), header.get("gpus")) or header.get("total")


def _read_sizes(words: Sequence[str]) -> Sizes:
    """Return the sizes in options such as `--nnodes 2`, `--gres=gpu:h100:8` and `-N 2`."""
    keys = {option: key for key, options in _OPTIONS.items() for option in options}
    sizes: Sizes = {}
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("-") and (key := keys.get(name.lstrip("-").replace("-", "_"))):
            number = (value if equals else following).rpartition(":")[2]
            # The first option counts, because a later one may be inside `$(srun --nodes=1 ...)`.
            sizes.setdefault(key, int(number) if number.isdecimal() else None)
    return sizes


def _multiply(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other
