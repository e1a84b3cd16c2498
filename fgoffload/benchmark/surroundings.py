"""Finds the package versions and environment variables that affect a benchmark."""

import dataclasses
import os
import re
from collections.abc import Mapping

from fgoffload.doctor.gpus import find_gpus
from fgoffload.doctor.machine import Machine

PACKAGES = ("fgoffload", "torch", "megatron-core", "transformer-engine", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
"""Distributions whose versions affect a benchmark."""

_VARIABLES = re.compile(
    r"NVTE_\w+|NCCL_\w+|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|OMP_NUM_THREADS"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Machine, package versions and environment variables that a process sees."""

    device: str
    """Name of the device in torch, or `CPU`."""
    driver: str | None
    """Driver version of the GPU; None without a GPU or if unknown."""
    python: str
    packages: Mapping[str, str]
    cuda: str | None
    """CUDA version that torch was built with."""
    cpus: int
    """Number of CPU cores that this process can use."""
    variables: Mapping[str, str]
    """Environment variables that affect the libraries, with their values. Unset variables are omitted."""


def find_surroundings(*, device: str) -> Surroundings:
    """Return the machine and versions of this process. `device` is the device's name in torch."""
    machine = Machine()
    gpus, _ = find_gpus(machine)
    versions = {name: machine.find_version(name) for name in PACKAGES}
    return Surroundings(
        device=device,
        driver=gpus[0].driver if gpus else None,
        python=machine.python_version,
        packages={name: version for name, version in versions.items() if version is not None},
        cuda=machine.find_cuda_version(),
        cpus=len(machine.cpus) or os.cpu_count() or 1,
        variables={name: value for name, value in machine.environment.items() if _VARIABLES.fullmatch(name)},
    )
