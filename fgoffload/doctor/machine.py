"""Reads the machine for the checks. Checks read it only through `Machine`, so that tests can pass another one."""

import dataclasses
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fgoffload.doctor.copies import CopyRates, measure_copies, try_pinning

_IGNORE_FOLDER = "-P" if sys.version_info >= (3, 11) else "-I"
"""Flag that keeps Python from importing a `torch.py` in the working folder. Before 3.11 it also hides user packages."""

TIMEOUT_SECONDS = 120.0
"""Timeout of a command. Importing torch and Transformer Engine takes half a minute from a slow disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    exit_code: int | None
    """Exit code; None if the command could not be started or took too long."""
    output: str
    """Stdout, then stderr. Without an exit code, the reason for that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, as the checks see it."""

    root: Path
    """Root folder of `proc` and `sys`."""
    environment: Mapping[str, str]
    python_version: str
    run: Callable[[Sequence[str], Mapping[str, str]], CommandResult]
    """Runs a command with additional environment variables."""
    find_version: Callable[[str], str | None]
    """Returns the version of an installed distribution, or None."""
    find_import_fault: Callable[[str], str | None]
    """Returns why a module cannot be imported, or None."""
    find_cuda_version: Callable[[], str | None]
    """Returns the CUDA version that torch was built for, or None."""
    count_gpus: Callable[[], int]
    """Returns how many GPUs torch can use."""
    find_gpu_uuid: Callable[[int], str]
    """Returns the UUID of a GPU, as `nvidia-smi` writes it, by torch's number."""
    measure_copies: Callable[[int], CopyRates]
    """Returns the rates of pinned copies to and from a GPU, by torch's number."""
    try_pinning: Callable[[], str | None]
    """Pins some host memory as the engine does, and returns the error or None."""
    memlock_limit_bytes: int | None
    """Limit of `ulimit -l` in bytes; None if there is no limit."""
    cpus: frozenset[int]
    """CPUs that this process may run on."""

    @staticmethod
    def here() -> "Machine":
        """Return this machine."""
        return Machine(
            root=Path("/"),
            environment=os.environ,
            python_version=platform.python_version(),
            run=run_command,
            find_version=_find_version,
            find_import_fault=_find_import_fault,
            find_cuda_version=_find_cuda_version,
            count_gpus=_count_gpus,
            find_gpu_uuid=_find_gpu_uuid,
            measure_copies=measure_copies,
            try_pinning=try_pinning,
            memlock_limit_bytes=_find_memlock_limit(),
            cpus=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        )


def run_command(words: Sequence[str], variables: Mapping[str, str]) -> CommandResult:
    """Run a command and wait for it.

    Args:
        words: The program and its arguments; `python` is this process's interpreter, without the working folder on its path.
        variables: Additional environment variables.
    """
    program = (sys.executable, _IGNORE_FOLDER) if words[0] == "python" else words[:1]
    try:
        ended = subprocess.run(
            [*program, *words[1:]],
            env={**os.environ, **variables},
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


def _find_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_import_fault(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return str(error)
    return None


def _find_cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def _count_gpus() -> int:
    if _find_import_fault("torch") is not None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _find_gpu_uuid(index: int) -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _find_memlock_limit() -> int | None:
    try:
        import resource
    except ImportError:  # not Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
