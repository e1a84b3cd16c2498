"""Reads the state of the machine. Checks access it only through `Machine`, which tests replace."""

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fgoffload.errors import OffloadError
from fgoffload.units import MIB

TIMEOUT_SECONDS = 120.0
"""Timeout for a command. Importing torch and Transformer Engine from a slow disk can take half a minute."""

COPY_BYTES = 256 * MIB
"""Size of a measured copy. At 50 GB/s, it takes 5 ms, so launch overhead is negligible."""
REPEATS = 5


class CopyRates(NamedTuple):
    """Copy rates in bytes per second. The fastest of several copies counts, because other load can only slow copies down."""

    d2h: float
    h2d: float


def measure_copies(index: int) -> CopyRates:
    """Return the copy rates between pinned memory and GPU `index`."""
    import torch

    device = torch.device("cuda", index)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def measure(destination: torch.Tensor, source: torch.Tensor) -> float:
        best_seconds = float("inf")
        for _ in range(REPEATS + 1):  # the first copy warms up
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            destination.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best_seconds = min(best_seconds, time.perf_counter() - start)
        return COPY_BYTES / best_seconds

    return CopyRates(d2h=measure(on_host, on_device), h2d=measure(on_device, on_host))


def try_pinning() -> str | None:
    """Pin and release `COPY_BYTES` of host memory as the engine does. Return the error, or None if it worked."""
    from fgoffload.engine import find_device

    try:
        slab = find_device("cuda").allocate_host(COPY_BYTES)
    except OffloadError as error:
        return str(error)
    slab.close()
    return None


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    exit_code: int | None
    """None if the command could not be started or timed out."""
    output: str
    """Stdout, then stderr; or the reason why there is no exit code."""


class Machine:
    """State of this machine, as read by the checks. `root` is the folder that contains `proc` and `sys`."""

    measure_copies = staticmethod(measure_copies)
    try_pinning = staticmethod(try_pinning)

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.environment: Mapping[str, str] = os.environ
        self.python_version = platform.python_version()
        self.cpus = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
        """CPUs that this process can run on. Empty if unknown."""

    def run(self, words: Sequence[str], variables: Mapping[str, str]) -> CommandResult:
        """Run a command with additional environment `variables`, and wait for it.

        If the first of `words` is `python`, it means this interpreter.
        """
        program = sys.executable if words[0] == "python" else words[0]
        try:
            ended = subprocess.run(
                [program, *words[1:]],
                # Since Python 3.11, PYTHONSAFEPATH stops Python from importing a `torch.py` in the working folder.
                env={**os.environ, "PYTHONSAFEPATH": "1", **variables},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except OSError as error:
            return CommandResult(None, f"{words[0]} cannot be started: {error.strerror}")
        except subprocess.TimeoutExpired:
            return CommandResult(None, f"{words[0]} took longer than {TIMEOUT_SECONDS:.0f} s")
        return CommandResult(ended.returncode, ended.stdout + ended.stderr)

    def find_version(self, distribution: str) -> str | None:
        """Return the version of a distribution, or None if it is not installed."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def find_import_fault(self, module: str) -> str | None:
        """Return why a module cannot be imported, or None if it can."""
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # OSError: a shared library is missing
            return str(error)
        return None

    def find_cuda_version(self) -> str | None:
        """Return the CUDA version that torch was built with, or None."""
        import torch

        return torch.version.cuda

    def count_gpus(self) -> int:
        """Return the number of GPUs that torch can use."""
        if self.find_import_fault("torch") is not None:
            return 0
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def find_gpu_uuid(self, index: int) -> str:
        """Return the UUID of torch's GPU `index`, in the format of `nvidia-smi`."""
        import torch

        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
