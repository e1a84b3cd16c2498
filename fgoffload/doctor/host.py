"""Checks pinned memory, the host memory of each rank, and the CPUs near each GPU."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fgoffload.doctor.gpus import Gpu
from fgoffload.doctor.machine import COPY_BYTES, Machine
from fgoffload.doctor.result import CheckResult, fail, ok, skip, warn
from fgoffload.errors import ConfigError
from fgoffload.units import GIB, format_bytes

MIN_BUDGET_BYTES = GIB
"""Minimum host memory per rank. With less, a rank can offload only a few tensors."""


def check_host(machine: Machine, gpus: Sequence[Gpu], reason: str) -> Iterator[CheckResult]:
    """Check pinned memory, free host memory, and which CPUs this process runs on."""
    yield check_pinned_memory(machine, has_gpu=machine.count_gpus() > 0)
    yield check_free_memory(machine, gpus)
    if not gpus:
        yield skip("CPUs near the GPU", reason)
    for index, gpu in enumerate(gpus):
        yield check_cpus(machine, index, gpu)


def check_pinned_memory(machine: Machine, *, has_gpu: bool) -> CheckResult:
    """Check that the process can pin host memory, by pinning and releasing some."""
    name = "pinned memory"
    if not has_gpu:
        return ok(name, "not tested, because the test requires a GPU")
    problem = machine.try_pinning()
    if problem is not None:
        # The fix is not `ulimit -l`, which CUDA ignores: with 8 MiB, an unprivileged process pinned 4 GiB (driver 580).
        return fail(name, problem, "free host memory or raise the container's memory limit")
    return ok(name, f"{format_bytes(COPY_BYTES)} pinned and released")


def check_free_memory(machine: Machine, gpus: Sequence[Gpu]) -> CheckResult:
    """Check that each rank's share of free host memory is large enough, within the limits of its cgroup."""
    name = "host memory"
    if machine.find_import_fault("torch") is not None:
        return skip(name, "torch is not installed")
    from fgoffload.engine.host_budget import HOST_SHARE, RANKS_PER_NODE_VARIABLES, get_default_budget_bytes

    try:
        share_bytes = get_default_budget_bytes(root=machine.root)
    except ConfigError as error:
        return fail(name, str(error), "set the variable to the number of ranks on this node")
    # If a launcher sets the number of ranks, `share_bytes` is already the share of one rank.
    is_launched = any(variable in machine.environment for variable in RANKS_PER_NODE_VARIABLES)
    ranks = 1 if is_launched else max(1, len(gpus))
    share_bytes //= ranks
    sharing = "the launcher's ranks" if is_launched else "1 rank" if ranks == 1 else f"{ranks} ranks, one for each GPU"
    found = f"{format_bytes(share_bytes)} per rank: {HOST_SHARE:.0%} of free memory, shared by {sharing}"
    fix = "free host memory, raise the container's limit, or set --offload-host-budget"
    if share_bytes < MIN_BUDGET_BYTES:
        return fail(name, found, fix)
    memory = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=0)
    if share_bytes < memory // 2:
        return warn(name, f"{found}; this is less than half of the GPU's memory ({format_bytes(memory)})", fix)
    return ok(name, found)


def check_cpus(machine: Machine, index: int, gpu: Gpu) -> CheckResult:
    """Check that this process runs on the GPU's NUMA node. Copies to another node's memory cross sockets."""
    name = f"GPU {index}: nearby CPUs"
    domain, _, rest = gpu.bus_id.lower().partition(":")
    node = _read_text(machine.root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    nodes = _read_cpu_list(_read_text(machine.root / "sys/devices/system/node/online"))
    if not node.isdigit() or not machine.cpus:  # the node is -1 if unknown
        return skip(name, "the GPU's NUMA node is unknown")
    if len(nodes) == 1:
        return ok(name, "the machine has only one NUMA node")
    near = _read_cpu_list(_read_text(machine.root / f"sys/devices/system/node/node{node}/cpulist"))
    fix = f"run the rank that uses GPU {index} under numactl --cpunodebind={node} --membind={node}"
    if not near & machine.cpus:
        return warn(name, f"this process cannot run on node {node}, the GPU's NUMA node", fix)
    if machine.cpus - near:
        found = f"this process can run on {len(machine.cpus)} CPUs, but only {len(near)} are on the GPU's NUMA node {node}"
        return warn(name, found, f"{fix}, or use torchrun --numa-binding node")
    return ok(name, f"this process runs on node {node}, the GPU's NUMA node")


def _read_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of numbers such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
