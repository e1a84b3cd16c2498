"""Fake machines for the checks of `fgoffload doctor`."""

import dataclasses

from fgoffload.doctor import CommandResult, Machine
from fgoffload.doctor.attention import PROBE
from fgoffload.doctor.gpus import QUERY
from fgoffload.doctor.machine import CopyRates

UUID = "GPU-aaaa"
VERSIONS = {"torch": "2.11.0+cu130", "megatron-core": "0.16.1", "transformer-engine": "2.20.2"}
SMI = "GPU-aaaa, NVIDIA H100 80GB HBM3, 00000000:17:00.0, 5, 16, 16, 81559, 580.65.06\n"
PROBE_OUTPUT = """\
[DEBUG    | DotProductAttention]: Available backends = {FlashAttention=False, FusedAttention=True (sub-backend 1)}
[DEBUG    | DotProductAttention]: Selected backend = FusedAttention.
probe: forward and backward ran
7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/python3/nvidia/cudnn/lib/libcudnn.so.9
7f02-7f03 r-xp 00000000 08:01 12 /usr/lib/python3/nvidia/cudnn/lib/libcudnn_graph.so.9
7f04-7f05 r-xp 00000000 08:01 13 /usr/lib/libc.so.6
"""


@dataclasses.dataclass
class CommandOutputs:
    """Outputs of the commands that a machine runs."""

    smi: CommandResult = dataclasses.field(default_factory=lambda: CommandResult(0, SMI))
    probe: CommandResult = dataclasses.field(default_factory=lambda: CommandResult(0, PROBE_OUTPUT))

    def run(self, words, variables):
        if tuple(words) == QUERY:
            return self.smi
        assert tuple(words) == ("python", "-c", PROBE)
        assert variables == {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
        return self.probe


def make_machine(root, **changes):
    """Return a healthy machine with one H100 on the first of two NUMA nodes, whose files are in `root`."""
    write(root / "proc/meminfo", "MemAvailable: 104857600 kB\n")  # 100 GiB
    write(root / "sys/bus/pci/devices/0000:17:00.0/numa_node", "0\n")
    write(root / "sys/devices/system/node/online", "0-1\n")
    write(root / "sys/devices/system/node/node0/cpulist", "0-3,8-11\n")
    write(root / "sys/devices/system/node/node1/cpulist", "4-7,12-15\n")
    machine = Machine(root)
    defaults = {
        "environment": {},
        "python_version": "3.12.1",
        "run": CommandOutputs().run,
        "find_version": VERSIONS.get,
        "find_import_fault": lambda module: None,
        "find_cuda_version": lambda: "13.0",
        "count_gpus": lambda: 1,
        "find_gpu_uuid": lambda index: UUID,
        "measure_copies": lambda index: CopyRates(d2h=50e9, h2d=53e9),
        "try_pinning": lambda: None,
        "cpus": frozenset({0, 1, 2, 3}),
    }
    vars(machine).update(defaults | changes)
    return machine


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
