"""Devices by the names that drivers give them, and what changes what libraries do."""

import dataclasses

import pytest

from fgoffload.benchmark.surroundings import find_hardware, find_surroundings
from fgoffload.doctor.machine import Machine


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA H200", "H200 141GB SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives(device, name):
    found = find_hardware(device)
    assert (None if found is None else found.name) == name


def test_only_variables_that_change_what_libraries_do_are_noted():
    environment = {
        "NVTE_CPU_OFFLOAD_V1": "1",
        "NCCL_ALGO": "^NVLS",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "x",
        "HOME": "/home/someone",
        "MY_TOKEN": "secret",
        "CUDA_HOME": "/usr/local/cuda",
    }
    versions = {"torch": "2.11.0", "megatron-core": "0.16.1"}
    machine = dataclasses.replace(
        Machine.here(),
        environment=environment,
        find_version=versions.get,
        count_gpus=lambda: 0,
        cpus=frozenset({1, 2, 5}),
    )
    found = find_surroundings(device="CPU", machine=machine)
    assert set(found.variables) == {"NVTE_CPU_OFFLOAD_V1", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    assert found.packages == versions
    assert (found.driver, found.cpus, found.device) == (None, 3, "CPU")
