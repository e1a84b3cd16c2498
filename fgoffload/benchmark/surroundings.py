"""Versions, device and relevant environment variables of a benchmark."""

import dataclasses
import os
import re
from collections.abc import Mapping

from fgoffload.doctor.gpus import find_gpus
from fgoffload.doctor.machine import Machine
from fgoffload.planner.timing.hardware import HARDWARE, Hardware

PACKAGES = ("fgoffload", "torch", "megatron-core", "transformer-engine", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
"""Distributions whose versions matter."""

_VARIABLES = re.compile(
    r"NVTE_\w+|NCCL_\w+|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|OMP_NUM_THREADS"
)

_OTHER_FORMS = re.compile(r"pcie|\bnvl\b", re.IGNORECASE)
"""Of an H100 or H200: cards of the same name whose rates are lower than those of the table, which are SXM's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The machine and versions that a process found."""

    device: str
    """As its maker calls it, or `CPU`."""
    driver: str | None
    """Of the GPU; None where there is none, or where it does not say."""
    python: str
    """Its version."""
    packages: Mapping[str, str]
    """Versions of those that are installed, by distribution."""
    cuda: str | None
    """The version that torch was built for."""
    cpus: int
    """Number of CPU cores that this process may use."""
    variables: Mapping[str, str]
    """Environment variables that are set and change what libraries do."""


def find_surroundings(*, device: str, machine: Machine | None = None) -> Surroundings:
    """Return what this process finds around itself.

    Args:
        device: What torch calls the device.
        machine: What is asked; None takes this one.
    """
    machine = Machine.here() if machine is None else machine
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


def find_hardware(device: str) -> Hardware | None:
    """Return the hardware of the table that a device is, by the name that its driver gives: `NVIDIA H100 80GB HBM3`.

    Returns:
        None where the table does not have it, or has another form of it.
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    for key, hardware in HARDWARE.items():
        if key in words and not (key in ("h100", "h200") and _OTHER_FORMS.search(device)):
            return hardware
    return None
