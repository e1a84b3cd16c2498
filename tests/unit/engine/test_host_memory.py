"""The default host budget: the tightest limit that holds for this process, shared among the ranks of the node."""

import json
import mmap
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fgoffload import ConfigError, HostMemory, StateError
from fgoffload.engine import AcceleratorDevice, CpuDevice, HostArena, OffloadEngine
from fgoffload.engine.host_memory import RANKS_PER_NODE_VARIABLES, SHARE, get_default_budget_bytes
from fgoffload.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712  # what version 1 says where there is no limit
V1_MOUNT = "36 32 0:33 {root} /sys/fs/cgroup/memory rw,relatime shared:15 - cgroup cgroup rw,memory"
V2_MOUNT = "30 24 0:27 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
OTHER_MOUNTS = (
    "24 1 259:1 / / rw,relatime - ext4 /dev/root rw",
    "37 32 0:34 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in RANKS_PER_NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Host:
    """A tree of files as the kernel shows it."""

    def __init__(self, root: Path, *, available_bytes: int = 100 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {500 << 20} kB\nMemFree: 5 kB\nMemAvailable: {available_bytes >> 10} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def place(self, *groups: str, mounts: tuple[str, ...]) -> None:
        """Put this process into control groups, as `/proc/self/cgroup` writes them."""
        self.write("proc/self/cgroup", "\n".join(groups))
        self.write("proc/self/mountinfo", "\n".join(OTHER_MOUNTS + mounts))

    def limit_v2(self, group: str, *, limit: object = "max", high: object = "max", used: int = 0, cached: int = 0) -> None:
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", used)
        self.write(f"{folder}/memory.stat", f"anon 1\nactive_file 77\ninactive_file {cached}")

    def limit_v1(self, group: str, *, limit: object = UNLIMITED_V1, used: int = 0, cached: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}")

    def get_free_bytes(self) -> int:
        return round(get_default_budget_bytes(root=self.root) / SHARE / MIB) * MIB  # a share of it was rounded down


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_without_control_groups_the_available_memory_counts(host):
    assert host.get_free_bytes() == 100 * GIB


def test_without_procfs_a_budget_is_there_all_the_same(tmp_path):
    assert get_default_budget_bytes(root=tmp_path) == int(16 * GIB * SHARE)


def test_the_machine_that_runs_the_tests_has_a_budget():
    assert 0 < get_default_budget_bytes() <= SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_own_group_of_version_2_counts_and_not_only_the_root(host):
    host.place("0::/job/rank", mounts=(V2_MOUNT.format(root="/"),))
    host.limit_v2("/job", limit="max", used=9 * GIB)
    host.limit_v2("/job/rank", limit=10 * GIB, used=2 * GIB)
    assert host.get_free_bytes() == 8 * GIB


@pytest.mark.parametrize("tightest", ["/job", "/job/step", "/job/step/rank"])
def test_the_tightest_limit_of_all_ancestors_counts(host, tightest):
    host.place("0::/job/step/rank", mounts=(V2_MOUNT.format(root="/"),))
    for group in ("/job", "/job/step", "/job/step/rank"):
        host.limit_v2(group, limit=(10 if group == tightest else 50) * GIB, used=GIB)
    assert host.get_free_bytes() == 9 * GIB


def test_what_an_ancestor_has_used_up_by_others_is_not_free(host):
    host.place("0::/job/rank", mounts=(V2_MOUNT.format(root="/"),))
    host.limit_v2("/job", limit=64 * GIB, used=60 * GIB)
    host.limit_v2("/job/rank", limit=32 * GIB, used=GIB)
    assert host.get_free_bytes() == 4 * GIB


def test_the_point_from_which_the_kernel_takes_memory_back_is_a_limit(host):
    host.place("0::/job", mounts=(V2_MOUNT.format(root="/"),))
    host.limit_v2("/job", limit=20 * GIB, high=12 * GIB, used=2 * GIB)
    assert host.get_free_bytes() == 10 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cached_files_that_nobody_reads_count_as_free(host, version):
    host.place("4:memory:/job", "0::/job", mounts=((V1_MOUNT if version == "v1" else V2_MOUNT).format(root="/"),))
    limit = host.limit_v1 if version == "v1" else host.limit_v2
    limit("/job", limit=20 * GIB, used=19 * GIB, cached=15 * GIB)
    assert host.get_free_bytes() == 16 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_group_over_its_limit_has_nothing_free(host, version):
    host.place("4:memory:/job", "0::/job", mounts=((V1_MOUNT if version == "v1" else V2_MOUNT).format(root="/"),))
    limit = host.limit_v1 if version == "v1" else host.limit_v2
    limit("/job", limit=GIB, used=2 * GIB)
    assert host.get_free_bytes() == 0


def test_the_own_group_of_version_1_and_its_ancestors_count(host):
    host.place("5:cpu,cpuacct:/cpu", "4:memory:/job/rank", mounts=(V1_MOUNT.format(root="/"),))
    host.limit_v1("", used=90 * GIB)
    host.limit_v1("/job", limit=10 * GIB, used=3 * GIB)
    host.limit_v1("/job/rank", used=2 * GIB)
    host.limit_v1("/cpu", limit=1)  # the group of another controller
    assert host.get_free_bytes() == 7 * GIB


def test_version_1_without_a_limit_leaves_the_available_memory(host):
    host.place("4:memory:/", mounts=(V1_MOUNT.format(root="/"),))
    host.limit_v1("", used=90 * GIB)
    assert host.get_free_bytes() == 100 * GIB


@pytest.mark.parametrize(
    ("group", "mounted_root"),
    [
        ("/docker/abc", "/docker/abc"),  # without a namespace of its own
        ("/", "/"),  # with one
        ("/docker/abc", "/kubepods/pod"),  # the group is hidden: what is mounted stands for it
        ("/../other", "/"),  # moved out of its namespace
    ],
)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_sees_its_group_at_the_mount(host, group, mounted_root, version):
    mount = (V1_MOUNT if version == "v1" else V2_MOUNT).format(root=mounted_root)
    host.place(f"4:memory:{group}", f"0::{group}", mounts=(mount,))
    limit = host.limit_v1 if version == "v1" else host.limit_v2
    limit("", limit=6 * GIB, used=2 * GIB)
    limit("/other", limit=1)
    assert host.get_free_bytes() == 4 * GIB


def test_a_group_below_the_one_that_is_mounted_counts(host):
    host.place("0::/docker/abc/rank", mounts=(V2_MOUNT.format(root="/docker/abc"),))
    host.limit_v2("", limit=60 * GIB)
    host.limit_v2("/rank", limit=6 * GIB)
    assert host.get_free_bytes() == 6 * GIB


def test_with_both_versions_mounted_both_count(host):
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    host.place("4:memory:/job", "0::/job", mounts=(V1_MOUNT.format(root="/"), unified))
    host.limit_v1("/job", limit=30 * GIB)
    host.limit_v2("/unified/job", limit=20 * GIB)
    assert host.get_free_bytes() == 20 * GIB


def test_a_control_group_that_says_nonsense_is_no_limit(host):
    host.place("0::/job", mounts=(V2_MOUNT.format(root="/"),))
    host.limit_v2("/job", limit="?", high="")
    host.write("sys/fs/cgroup/job/memory.current", "?")
    assert host.get_free_bytes() == 100 * GIB


def test_available_memory_counts_where_it_is_less_than_the_limit(host):
    host.place("0::/job", mounts=(V2_MOUNT.format(root="/"),))
    host.limit_v2("/job", limit=400 * GIB)
    assert host.get_free_bytes() == 100 * GIB


@pytest.mark.parametrize("name", RANKS_PER_NODE_VARIABLES)
def test_ranks_of_a_node_share_the_memory(host, name, monkeypatch):
    monkeypatch.setenv(name, "8")
    assert get_default_budget_bytes(root=host.root) == int(100 * GIB * SHARE / 8)


def test_what_torchrun_says_comes_first(host, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert get_default_budget_bytes(root=host.root) == int(100 * GIB * SHARE / 8)


@pytest.mark.parametrize("text", ["", "0", "-1", "8.0", "eight", "1_000", "²", " 8"])
def test_a_number_of_ranks_that_is_none_is_one_clear_error(host, text, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ConfigError) as caught:
        get_default_budget_bytes(root=host.root)
    for part in (f"LOCAL_WORLD_SIZE={text!r}", "number of ranks", "1 or more", "--offload-host-budget"):
        assert part in str(caught.value)


def test_a_budget_that_is_given_asks_nobody(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "eight")

    assert OffloadEngine(device=CpuDevice(), host_budget_bytes=1 << 20).arena.reserved_bytes == 0
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        OffloadEngine(device=CpuDevice())


# What the system counts.


RESERVING = """
import json
from pathlib import Path

from fgoffload.engine import CpuDevice, HostArena

MIB = 2**20


def read_bytes():
    pairs = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {name: text.split()[0] for name, text in pairs if name in ("RssAnon", "VmSize")}
    return {name: int(size) * 1024 for name, size in sizes.items()}


arena = HostArena(CpuDevice(), budget_bytes=2**30, slab_bytes=MIB)
before = read_bytes()
blocks = [arena.find_block(size_bytes) for size_bytes in (33 * MIB, 34 * MIB + 1, 65 * MIB)]
for block in blocks:
    block.buffer.fill_(1)
reserved_bytes, filled = arena.reserved_bytes, read_bytes()
blocks.clear()
del block
for size_bytes in range(MIB, 33 * MIB, 3 * MIB + 77):  # other shapes in the same memory
    arena.find_block(size_bytes).buffer.fill_(2)
print(json.dumps([reserved_bytes, before, filled, read_bytes(), arena.close() or read_bytes()]))
"""


@pytest.fixture(scope="module")
def reserving():
    """Return what is reserved, and what the system counts before, with all filled, with other shapes and at the end.

    In a process of its own: where much has been allocated, the C library may put a slab into a hole of its heap, which the
    system may have counted already and which stays when the slab goes, 33 MiB of it in two runs of all tests.
    """
    done = subprocess.run([sys.executable, "-c", RESERVING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs procfs")
@pytest.mark.parametrize("name", ["RssAnon", "VmSize"])
def test_on_the_cpu_the_system_counts_the_bytes_that_were_reserved_and_no_power_of_two(name, reserving):
    reserved_bytes, *counts = reserving
    before, filled, with_others, at_the_end = (count[name] for count in counts)
    assert reserved_bytes == 132 * MIB + 512  # rounded up it would be 256 MiB
    assert abs(filled - before - reserved_bytes) < 4 * MIB
    assert abs(with_others - before - reserved_bytes) < 4 * MIB
    assert at_the_end - before < 4 * MIB


# Memory that the driver refuses to lock. What stands in for CUDA here has no GPU behind it.


class Cudart:
    """The two calls of the CUDA runtime that lock and unlock, and what they answer."""

    def __init__(self, *, status: int) -> None:
        self.status = status
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def read_mapping_flags(address: int) -> set[str]:
    """Return what the kernel notes of the mapping that `address` lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            is_inside = int(span[1], 16) <= address < int(span[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping has {address:#x}")


@pytest.fixture
def make_cuda_device(monkeypatch):
    def make(status: int) -> tuple[AcceleratorDevice, Cudart]:
        cudart = Cudart(status=status)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch, "Stream", lambda device: types.SimpleNamespace(device=device))
        monkeypatch.setattr(torch, "Event", lambda device: types.SimpleNamespace(device=device))
        return AcceleratorDevice(host_memory=HostMemory.PINNED), cudart

    return make


def test_memory_is_locked_at_its_exact_size_and_unlocked_at_close(make_cuda_device):
    device, cudart = make_cuda_device(0)
    arena = HostArena(device, budget_bytes=GIB)
    block = arena.find_block(300 * MIB + 1)
    assert sum(cudart.locked.values()) == arena.reserved_bytes == 300 * MIB + 512
    del block
    arena.close()
    assert cudart.locked == {}


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs a system that knows huge pages")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs a kernel with huge pages")
def test_locked_memory_may_lie_in_huge_pages_and_does_not_reach_forked_processes(make_cuda_device):
    device, _ = make_cuda_device(0)
    slab = device.allocate_host(8 * MIB)
    flags = read_mapping_flags(slab.buffer.data_ptr())
    assert {"hg", "dc"} <= flags
    assert "sh" not in flags  # of memory that may be shared, the kernel makes huge pages by a setting of its own
    slab.close()


def test_memory_that_cannot_be_locked_is_one_clear_error_and_the_arena_goes_on(make_cuda_device):
    device, cudart = make_cuda_device(2)
    arena = HostArena(device, budget_bytes=8 * MIB)
    with pytest.raises(StateError) as caught:
        arena.find_block(6 * MIB)
    for part in ("could not lock 8.00 MiB", "returned 2", "--offload-host-budget", "ulimit -l"):
        assert part in str(caught.value)
    assert arena.used_bytes == arena.reserved_bytes == 0
    cudart.status = 0
    block = arena.find_block(6 * MIB)
    assert block is not None
    del block
    arena.close()


def test_memory_that_the_system_does_not_have_is_one_clear_error(make_cuda_device):
    device, _ = make_cuda_device(0)
    with pytest.raises(StateError, match=r"no 2\.00 TiB|no \d+\.\d+ TiB of host memory") as caught:
        device.allocate_host(1 << 55)
    assert "--offload-host-budget" in str(caught.value)


def test_pageable_memory_is_not_locked(make_cuda_device):
    _, cudart = make_cuda_device(0)
    assert AcceleratorDevice(host_memory=HostMemory.PAGEABLE).allocate_host(4096).buffer.numel() == 4096
    assert cudart.locked == {}
