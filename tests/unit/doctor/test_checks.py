"""Tests each check of `fgoffload doctor` on fake machines."""

import pytest
from support.machines import PROBE_OUTPUT, SMI, VERSIONS, CommandOutputs, make_machine, write

from fgoffload.doctor import CommandResult, Status, check_machine
from fgoffload.doctor.machine import CopyRates

ALL_ROWS = (
    "Python, torch, megatron-core, Transformer Engine, GPUs, GPU 0: link to the host, GPU 0: copy rates, pinned memory, "
    "host memory, GPU 0: nearby CPUs, attention allowed, attention's backward, "
    "Megatron-LM's own check, CUDA's queues, attention kernel, cuDNN"
)

UNFUSED = PROBE_OUTPUT.replace("Selected backend = FusedAttention", "Selected backend = UnfusedDotProductAttention")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def check(root, name, **changes):
    """Return the row `name` of a healthy machine with `changes`, and check that all other rows are ok or skipped."""
    rows = {result.name: result for result in check_machine(make_machine(root, **changes))}
    assert {other for other, row in rows.items() if row.status not in (Status.OK, Status.SKIPPED)} <= {name}
    return rows[name]


def test_a_healthy_machine_has_all_rows_with_status_ok(tmp_path):
    results = list(check_machine(make_machine(tmp_path)))
    assert ", ".join(result.name for result in results) == ALL_ROWS
    assert {result.status for result in results} == {Status.OK}
    assert {result.fix for result in results} == {""}


def test_without_a_gpu_its_rows_are_skipped_and_the_others_checked(tmp_path):
    def fail(*args):
        raise AssertionError("the GPU must not be used")

    machine = make_machine(tmp_path, count_gpus=lambda: 0, measure_copies=fail, try_pinning=fail, run=fail)
    rows = {result.name: result for result in check_machine(machine)}
    skipped = ["GPUs", "link to the host", "copy rates", "CPUs near the GPU", "attention kernel", "cuDNN"]
    assert [name for name, row in rows.items() if row.status is Status.SKIPPED] == skipped
    assert {rows[name].found for name in skipped} == {"torch finds no usable GPU"}
    assert rows["pinned memory"].found == "not tested, because the test requires a GPU"
    assert rows["host memory"].status is Status.OK


def test_without_transformer_engine_its_rows_are_skipped(tmp_path):
    versions = {name: version for name, version in VERSIONS.items() if name != "transformer-engine"}
    for name in ("attention kernel", "cuDNN"):
        row = check(tmp_path, name, find_version=versions.get)
        assert (row.status, row.found) == (Status.SKIPPED, "Transformer Engine is not installed")


@pytest.mark.parametrize(
    ("changes", "name", "status", "message"),
    [
        ({"python_version": "3.14.0"}, "Python", Status.ERROR, "use Python 3.10 to 3.13"),
        ({"find_version": (VERSIONS | {"torch": "2.8.0"}).get}, "torch", Status.ERROR, "install torch 2.9 or newer"),
        (
            {"find_version": (VERSIONS | {"megatron-core": "0.15.0"}).get},
            "megatron-core",
            Status.ERROR,
            "megatron-core>=0.16.1",
        ),
        ({"try_pinning": lambda: "CUDA could not pin"}, "pinned memory", Status.ERROR, "container's memory limit"),
        ({"cpus": frozenset({4, 5})}, "GPU 0: nearby CPUs", Status.WARNING, "numactl --cpunodebind=0 --membind=0"),
        ({"measure_copies": lambda index: CopyRates(d2h=53e9, h2d=12e9)}, "GPU 0: copy rates", Status.WARNING, ""),
        ({"run": CommandOutputs(probe=CommandResult(0, UNFUSED)).run}, "attention kernel", Status.ERROR, ""),
    ],
)
def test_problems_have_a_status_and_a_fix(tmp_path, changes, name, status, message):
    row = check(tmp_path, name, **changes)
    assert row.status is status
    assert message in row.fix


def test_copy_rates_are_compared_with_the_active_lanes_and_missing_lanes_warn(tmp_path):
    answers = CommandOutputs(smi=CommandResult(0, SMI.replace("5, 16, 16", "5, 8, 16")))
    machine = make_machine(tmp_path, run=answers.run, measure_copies=lambda index: CopyRates(d2h=25e9, h2d=26e9))
    rows = {result.name: result for result in check_machine(machine)}
    link, rates = rows["GPU 0: link to the host"], rows["GPU 0: copy rates"]
    assert (link.status, link.found) == (Status.WARNING, "PCIe 5 x8: up to 32 GB/s each way; the GPU supports x16")
    assert rates.status is Status.OK


def test_gpus_have_the_indices_of_torch(tmp_path):
    other = SMI.replace("GPU-aaaa", "GPU-bbbb").replace("H100 80GB HBM3", "H200").replace("17:00", "18:00")
    write(tmp_path / "sys/bus/pci/devices/0000:18:00.0/numa_node", "1\n")
    machine = make_machine(
        tmp_path,
        run=CommandOutputs(smi=CommandResult(0, SMI + other)).run,
        count_gpus=lambda: 2,
        find_gpu_uuid=lambda index: ["GPU-bbbb", "GPU-aaaa"][index],
    )
    rows = {result.name: result for result in check_machine(machine)}
    assert "node 1" in rows["GPU 0: nearby CPUs"].found
    assert "node 0" in rows["GPU 1: nearby CPUs"].found


def test_host_memory_is_divided_by_gpus_unless_a_launcher_sets_the_ranks(tmp_path, monkeypatch):
    assert "60.00 GiB per rank" in check(tmp_path, "host memory").found
    rows = SMI + SMI.replace("GPU-aaaa", "GPU-bbbb").replace("81559", "16384")
    two_gpus = {"run": CommandOutputs(smi=CommandResult(0, rows)).run, "count_gpus": lambda: 2}
    two_gpus["find_gpu_uuid"] = lambda index: ["GPU-aaaa", "GPU-bbbb"][index]
    assert "60% of free memory, shared by 2 ranks, one for each GPU" in check(tmp_path, "host memory", **two_gpus).found
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = check(tmp_path, "host memory", environment={"LOCAL_WORLD_SIZE": "4"}, **two_gpus).found
    assert "15.00 GiB per rank" in found


@pytest.mark.parametrize(
    ("environment", "name", "status", "message"),
    [
        (
            {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
            "attention allowed",
            Status.ERROR,
            "none (NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0 NVTE_UNFUSED_ATTN=0)",
        ),
        ({"NVTE_FLASH_ATTN": "0"}, "attention allowed", Status.OK, "fused, unfused"),
        ({"NVTE_CPU_OFFLOAD_V1": "0"}, "Megatron-LM's own check", Status.WARNING, "rejects its own offload flags"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA's queues", Status.WARNING, "share one queue"),
    ],
)
def test_environment_variables_are_checked(tmp_path, environment, name, status, message):
    row = check(tmp_path, name, environment=environment)
    assert row.status is status
    assert message in row.found


def test_a_failed_attention_probe_is_an_error_with_its_last_line(tmp_path):
    failed_probe = CommandResult(1, "Traceback (most recent call last):\nImportError: libcudnn.so.9: cannot open\n\n")
    row = check(tmp_path, "attention kernel", run=CommandOutputs(probe=failed_probe).run)
    assert row.status is Status.ERROR
    assert row.found.endswith("ImportError: libcudnn.so.9: cannot open")


def test_two_cudnns_in_one_process_are_an_error_with_variables_to_set(tmp_path):
    output = PROBE_OUTPUT + "7f06-7f07 r-xp 00000000 08:01 14 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.5.1\n"
    row = check(tmp_path, "cuDNN", run=CommandOutputs(probe=CommandResult(0, output)).run)
    assert row.status is Status.ERROR
    assert "/usr/lib/x86_64-linux-gnu and" not in row.found.split(" and ")[0]
    assert "CUDNN_HOME=/usr/lib/python3/nvidia/cudnn " in row.fix
    assert "LD_LIBRARY_PATH=/usr/lib/python3/nvidia/cudnn/lib:$LD_LIBRARY_PATH" in row.fix
