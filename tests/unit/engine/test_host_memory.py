"""Tests the default host budget: the tightest limit of this process, shared by the ranks of the node."""

import os
import types
from pathlib import Path

import pytest
import torch

from fgoffload import ConfigError, HostMemory, StateError
from fgoffload.engine import AcceleratorDevice, CpuDevice, OffloadEngine
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_budget import HOST_SHARE, RANKS_PER_NODE_VARIABLES, get_default_budget_bytes
from fgoffload.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712  # the value of cgroup v1 without a limit


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in RANKS_PER_NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fgoffload.engine.host_budget._process_budgets", {})  # set by engines of other tests


class Host:
    """A fake tree of `/proc` and `/sys` files."""

    def __init__(self, root: Path, *, available_bytes: int = 100 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {500 << 20} kB\nMemFree: 5 kB\nMemAvailable: {available_bytes >> 10} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def place(self, *groups: str) -> None:
        """Put this process into cgroups, in the format of `/proc/self/cgroup`."""
        self.write("proc/self/cgroup", "\n".join(groups))

    def limit(self, version: str, group: str, *, limit: object = None, high: object = "max", used=0, cached=0) -> None:
        """Set the limits and usage of a cgroup, in GiB."""
        limit, used, cached = (round(n * GIB) if isinstance(n, int | float) else n for n in (limit, used, cached))
        if version == "v1":
            folder, names = f"sys/fs/cgroup/memory{group}", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}")
        else:
            folder, names = f"sys/fs/cgroup{group}", ("memory.max", "memory.current")
            self.write(f"{folder}/memory.stat", f"anon 1\nactive_file 77\ninactive_file {cached}")
            self.write(f"{folder}/memory.high", high if isinstance(high, str) else high * GIB)
        self.write(f"{folder}/{names[0]}", (UNLIMITED_V1 if version == "v1" else "max") if limit is None else limit)
        self.write(f"{folder}/{names[1]}", used)

    def get_free_bytes(self) -> int:
        return round(get_default_budget_bytes(root=self.root) / HOST_SHARE / MIB) * MIB  # the share was rounded down


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_the_default_budget_without_procfs_assumes_16_gib(tmp_path):
    assert get_default_budget_bytes(root=tmp_path) == int(16 * GIB * HOST_SHARE)


def test_the_default_budget_on_this_machine_is_positive_and_within_its_memory():
    assert 0 < get_default_budget_bytes() <= HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


LIMITS = {
    # Cgroups of the process, their limits, and the free GiB of 100 available.
    "none": ((), (), 100),
    "own group, not the root": (["0::/job"], [("v2", "", {"used": 9}), ("v2", "/job", {"limit": 10, "used": 2})], 8),
    "an ancestor": (["0::/a/b"], [("v2", "/a", {"limit": 10, "used": 1}), ("v2", "/a/b", {"limit": 50, "used": 1})], 9),
    "used by others in an ancestor": (["0::/a/b"], [("v2", "/a", {"limit": 64, "used": 60}), ("v2", "/a/b", {"limit": 32})], 4),
    "limit at which the kernel reclaims": (["0::/job"], [("v2", "/job", {"limit": 20, "high": 12, "used": 2})], 10),
    "unread cached files, v1": (["4:memory:/a"], [("v1", "/a", {"limit": 20, "used": 19, "cached": 15})], 16),
    "unread cached files, v2": (["0::/a"], [("v2", "/a", {"limit": 20, "used": 19, "cached": 15})], 16),
    "over the limit": (["0::/a"], [("v2", "/a", {"limit": 1, "used": 2})], 0),
    "version 1": (
        ["5:cpu,cpuacct:/cpu", "4:memory:/job/rank"],
        [("v1", "/job", {"limit": 10, "used": 3}), ("v1", "/job/rank", {"used": 2}), ("v1", "/cpu", {"limit": 0})],
        7,
    ),
    "version 1 without a limit": (["4:memory:/"], [("v1", "", {"used": 90})], 100),
    "both versions": (["4:memory:/job", "0::/job"], [("v1", "/job", {"limit": 30}), ("v2", "/unified/job", {"limit": 20})], 20),
    "below the mount point": (["0::/docker/rank"], [("v2", "", {"limit": 60}), ("v2", "/rank", {"limit": 6})], 6),
    "invalid": (["0::/job"], [("v2", "/job", {"limit": "?", "high": "", "used": "?"})], 100),
    "above the available memory": (["0::/job"], [("v2", "/job", {"limit": 400})], 100),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_tightest_cgroup_limit_applies(host, case):
    groups, limits, free_gib = LIMITS[case]
    if groups:
        host.place(*groups)
    for version, group, numbers in limits:
        host.limit(version, group, **numbers)
    assert host.get_free_bytes() == free_gib * GIB


@pytest.mark.parametrize(
    "group", ["/docker/abc", "/", "/../other"], ids=["no namespace, or hidden", "with a namespace", "outside its namespace"]
)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_reads_its_cgroup_limit_at_the_mount_point(host, group, version):
    host.place(f"4:memory:{group}", f"0::{group}")
    host.limit(version, "", limit=6, used=2)
    host.limit(version, "/other", limit=0)
    assert host.get_free_bytes() == 4 * GIB


@pytest.mark.parametrize("name", RANKS_PER_NODE_VARIABLES)
def test_ranks_on_a_node_share_the_host_memory(host, name, monkeypatch):
    monkeypatch.setenv(name, "8")
    assert get_default_budget_bytes(root=host.root) == int(100 * GIB * HOST_SHARE / 8)


def test_the_torchrun_variable_takes_precedence(host, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert get_default_budget_bytes(root=host.root) == int(100 * GIB * HOST_SHARE / 8)


@pytest.mark.parametrize("text", ["", "0", "-1", "8.0", "eight", "1_000", "²", " 8"])
def test_an_invalid_number_of_ranks_raises_one_clear_error(host, text, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ConfigError) as caught:
        get_default_budget_bytes(root=host.root)
    for part in (f"LOCAL_WORLD_SIZE={text!r}", "number of ranks", "1 or more", "--offload-host-budget"):
        assert part in str(caught.value)


def test_an_explicit_budget_does_not_read_the_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "eight")

    assert OffloadEngine(device=CpuDevice(), host_budget_bytes=1 << 20).arena.reserved_bytes == 0
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        OffloadEngine(device=CpuDevice())


# Memory that the driver refuses to pin, with a fake CUDA runtime.


class Cudart:
    """A fake CUDA runtime with the two calls that pin and unpin memory."""

    def __init__(self, *, status: int) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.pinned[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def make_cuda_device(monkeypatch):
    def make(status: int) -> tuple[AcceleratorDevice, Cudart]:
        cudart = Cudart(status=status)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch, "Stream", lambda device: types.SimpleNamespace(device=device))
        monkeypatch.setattr(
            torch,
            "Event",
            lambda device, enable_timing=False: types.SimpleNamespace(record=lambda stream: None, query=lambda: True),
        )
        return AcceleratorDevice(host_memory=HostMemory.PINNED), cudart

    return make


def test_memory_is_pinned_at_its_exact_size_and_unpinned_at_close(make_cuda_device):
    device, cudart = make_cuda_device(0)
    arena = HostArena(device, budget=GIB)
    block = arena.find_block(300 * MIB + 1)
    assert sum(cudart.pinned.values()) == arena.reserved_bytes == 300 * MIB + 512
    del block
    arena.close()
    assert cudart.pinned == {}


def test_a_pinning_failure_raises_one_clear_error_and_leaves_the_arena_usable(make_cuda_device):
    device, cudart = make_cuda_device(2)
    arena = HostArena(device, budget=8 * MIB)
    with pytest.raises(StateError) as caught:
        arena.find_block(6 * MIB)
    for part in ("could not pin 6.00 MiB", "returned 2", "--offload-host-budget", "container's memory limit"):
        assert part in str(caught.value)
    assert arena.used_bytes == arena.reserved_bytes == 0
    cudart.status = 0
    block = arena.find_block(6 * MIB)
    assert block is not None
    del block
    arena.close()


def test_an_allocation_beyond_system_memory_raises_one_clear_error(make_cuda_device):
    device, _ = make_cuda_device(0)
    with pytest.raises(StateError, match=r"could not allocate \d+\.\d+ TiB of host memory") as caught:
        device.allocate_host(1 << 55)
    assert "--offload-host-budget" in str(caught.value)


def test_all_engines_in_a_process_share_one_default_budget(monkeypatch):
    monkeypatch.setattr("fgoffload.engine.host_budget.get_default_budget_bytes", lambda: 12 * MIB)
    arenas = [OffloadEngine(device=CpuDevice()).arena for _ in range(3)]
    assert sum(arena.budget_bytes for arena in arenas) == 12 * MIB
    blocks = [arena.find_block(4 * MIB) for arena in arenas]
    assert all(block is not None for block in blocks)
    assert [arena.find_block(1) for arena in arenas] == [None] * 3
    assert OffloadEngine(device=CpuDevice(), host_budget_bytes=MIB).arena.find_block(MIB) is not None


def test_no_memory_is_pinned_during_graph_capture(make_cuda_device, monkeypatch):
    device, cudart = make_cuda_device(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert HostArena(device, budget=GIB).find_block(MIB) is None
    assert cudart.pinned == {}
