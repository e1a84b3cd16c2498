"""Counts the GPUs of a launch script, from the command that starts Python and from the `#SBATCH` lines."""

import math
import re
from collections.abc import Mapping, Sequence

_HEADER = re.compile(r"^#SBATCH\s+([^#\n]*)", re.MULTILINE)
_TORCHRUN = re.compile(r"(.*/)?torchrun|torch\.distributed\.(run|launch)")
_NODES = ("nnodes", "nodes", "N", "num_nodes")
_PER_NODE = ("nproc_per_node", "ntasks_per_node", "num_gpus")
_TOTAL = ("ntasks", "n", "np", "num_processes")
_GPUS = ("gpus_per_node", "gres")


def read_slurm(text: str) -> dict[str, str]:
    """Return the variables that SLURM sets from the `#SBATCH` lines of a script."""
    options = _read_options(" ".join(_HEADER.findall(text)).split())
    nodes, per_node, total, gpus = (_find(options, names) for names in (_NODES, _PER_NODE, _TOTAL, _GPUS))
    gpus = gpus and gpus.rpartition(":")[2]  # gpu:h100:8
    total = total or _multiply(nodes, per_node)
    found = {
        ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"): nodes,
        ("SLURM_NTASKS_PER_NODE",): per_node,
        ("SLURM_NTASKS", "SLURM_NPROCS"): total,
        ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"): gpus,
    }
    return {name: size for names, size in found.items() for name in names if size and size.isdecimal()}


def count_gpus(launch: Sequence[str], slurm: Mapping[str, str]) -> int | None:
    """Return the number of processes that a command starts, or None if it is unknown.

    Args:
        launch: Words before the Python script.
        slurm: Variables from `read_slurm`, for an `srun` without sizes and for a command that does not tell.
    """
    begin = next((place for place, word in enumerate(launch) if _TORCHRUN.fullmatch(word)), None)
    options = _read_options(launch[begin or 0 :])
    nodes, per_node = _find(options, _NODES), _find(options, _PER_NODE)
    total, gpus, slurm_nodes = None, slurm.get("SLURM_GPUS_ON_NODE"), slurm.get("SLURM_NNODES")
    if begin is not None or "nproc_per_node" in options:
        total = _multiply(nodes or "1", gpus if per_node in ("gpu", "auto") else per_node or "1")
    elif launch:
        per_node = per_node or slurm.get("SLURM_NTASKS_PER_NODE")
        total = _find(options, _TOTAL) or _multiply(nodes or slurm_nodes, per_node)
    total = total or _multiply(slurm_nodes, gpus) or slurm.get("SLURM_NTASKS")
    return int(total) if total and total.isdecimal() else None


def _read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of `--name value`, `--name=value` and `-n value`, by name with `_` for `-`."""
    found = {}
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            found[name.lstrip("-").replace("-", "_")] = value if equals else following
    return found


def _find(options: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((options[name] for name in names if name in options), None)


def _multiply(*sizes: str | None) -> str | None:
    known = [int(size) for size in sizes if size is not None and size.isdecimal()]
    return str(math.prod(known)) if len(known) == len(sizes) else None
