"""Tools that watch a whole process find nothing in a step with the engine, and do find a fault that was put there.

[Note: What PyTorch's stream sanitizer sees]
It sees each kernel that the dispatcher launches, with the first address of each CUDA tensor that it reads or writes, and each
event and wait, of `torch.Event` and `torch.Stream` too: their CUDA implementation reports to the same trace as
`torch.cuda.Event`. Host tensors it does not look at, and what it knows of an address ends when the memory is freed. So of the
hazards it can see those in which two streams touch living device memory: a source that is read before it is written, and a
buffer that is written before its memory is free or read before it is filled. It cannot see a host block, nor memory that was
given to another tensor. It takes `torch.empty` and `set_` for writes on the current stream; both are in the order of the
waits here, so it has nothing to complain about. Source: `torch/cuda/_sanitizer.py` and `c10/cuda/impl/CUDAGuardImpl.h` of
torch 2.13.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("one_step.py")
ERROR_EXIT_CODE = 9
UNSUPPORTED = ("Device not supported", "not supported on this", "Unable to find", "No attachable process", "driver version")
"""What compute-sanitizer says where the machine does not let it in: a sandbox, or a driver older than itself."""


def run_script(*arguments: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_script_alone_gives_the_same_bits():
    result = run_script()
    assert (result.returncode, result.stdout) == (0, "same bits\n"), result.stderr


def test_the_stream_sanitizer_finds_no_race():
    result = run_script(TORCH_CUDA_SANITIZER="1")
    assert "CSAN" not in result.stderr, result.stderr[-4000:]
    assert (result.returncode, result.stdout) == (0, "same bits\n"), result.stderr[-4000:]


@pytest.mark.parametrize("left_out", ["SOURCE_UNWRITTEN", "BUFFER_STILL_USED", "BUFFER_UNFILLED"])
def test_the_stream_sanitizer_finds_a_wait_that_is_left_out(left_out):
    result = run_script("--leave-out", left_out, TORCH_CUDA_SANITIZER="1")
    assert result.returncode not in (0, 3), result.stdout
    assert "CSAN detected a possible data race" in result.stderr


@functools.cache
def find_memcheck() -> tuple[str, ...]:
    """Return the command line of memcheck; skip where the tool is not here or not let in."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    # Errors that the runtime returns are torch's to judge: it asks for some, as whether an event has passed.
    return (tool, "--tool", "memcheck", "--error-exitcode", str(ERROR_EXIT_CODE), "--report-api-errors", "no")


def run_under_memcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without torch's cache each tensor is an allocation of the driver, whose bounds the tool knows.
    result = run_script(*arguments, before=find_memcheck(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    said = result.stdout + result.stderr
    for phrase in UNSUPPORTED:
        if phrase in said:
            pytest.skip(f"compute-sanitizer cannot run here: {said[max(0, said.index(phrase) - 80) :][:200]}")
    return result


def test_memcheck_finds_no_access_out_of_bounds():
    result = run_under_memcheck()
    assert "ERROR SUMMARY: 0 errors" in result.stdout, result.stdout[-4000:]
    assert "same bits" in result.stdout
    assert result.returncode == 0


def test_memcheck_finds_a_read_past_the_end():
    result = run_under_memcheck("--read-past-the-end")
    assert result.returncode != 0
    assert "Invalid __global__ read" in result.stdout
