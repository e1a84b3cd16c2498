"""Checks package versions, and environment variables of Transformer Engine and CUDA."""

import re
from collections.abc import Iterator, Mapping

from fgoffload.doctor.machine import Machine
from fgoffload.doctor.result import CheckResult, fail, ok, warn

_PYTHON_FROM, _PYTHON_BELOW = (3, 10), (3, 14)
_TORCH_FROM = (2, 9)
_CORE_FROM = (0, 16, 1)
_ENGINE_FROM = (2, 15)
"""Earlier versions read `grad_added_to_main_grad` from the weight that autograd saved. Under saved-tensor hooks, that is a
different tensor unless Transformer Engine's own offload is on. Source: v2.14 and v2.15 of `linear.py`, `grouped_linear.py`."""

_BACKENDS = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def check_versions(machine: Machine) -> Iterator[CheckResult]:
    """Check Python, torch, Megatron-Core and Transformer Engine."""
    python = machine.python_version
    is_known = _PYTHON_FROM <= _read(python) < _PYTHON_BELOW
    yield ok("Python", python) if is_known else fail("Python", python, "use Python 3.10 to 3.13")
    yield _check_torch(machine)
    yield _check_megatron(machine.find_version("megatron-core"))
    yield _check_transformer_engine(machine.find_version("transformer-engine"))


def _check_torch(machine: Machine) -> CheckResult:
    found = machine.find_version("torch")
    if found is None:
        missing = "not installed; only `fgoffload plan`, `doctor` and `completion` work without it"
        return fail("torch", missing, "install torch 2.9 or newer: pip install 'fgoffload[torch]'")
    fault = machine.find_import_fault("torch")
    if fault is not None:
        return fail("torch", f"{found} cannot be imported: {fault}", "reinstall torch: pip install --force-reinstall torch")
    if _read(found) < _TORCH_FROM:
        return fail("torch", found, "install torch 2.9 or newer")
    cuda = machine.find_cuda_version()
    if cuda is None:
        build = "to train on a GPU, install a build with CUDA: https://pytorch.org/get-started/locally"
        return warn("torch", f"{found}, built without CUDA", build)
    return ok("torch", f"{found}, CUDA {cuda}")


def _check_megatron(found: str | None) -> CheckResult:
    if found is None:
        return ok("megatron-core", "not installed; required only for Megatron")
    if _read(found) < _CORE_FROM:
        return fail("megatron-core", found, "pip install 'megatron-core>=0.16.1'")
    return ok("megatron-core", found)


def _check_transformer_engine(found: str | None) -> CheckResult:
    name = "Transformer Engine"
    if found is None:
        return ok(name, "not installed; required only for its layers in Megatron")
    if _read(found) < _ENGINE_FROM:
        fault = "with fused gradient accumulation, its linear layers use the wrong weight under saved-tensor hooks"
        fix = "install Transformer Engine 2.15 or newer, or use --no-gradient-accumulation-fusion"
        return warn(name, f"{found}: {fault}", fix)
    return ok(name, found)


def _read(version: str) -> tuple[int, ...]:
    """Return the leading numbers of `version`. For `2.11.0+cu130`, they are (2, 11, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_environment(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the variables of Transformer Engine and CUDA that affect offload or bitwise comparisons."""
    yield _check_backends(environment)
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    # This variable does not affect offload, but it matters for bitwise comparisons.
    effect = "results may differ in the last bits between runs; 0 makes them deterministic"
    if environment.get(variable) == "0":
        effect = "deterministic"
    yield ok("attention's backward", f"{_describe(environment, variable)}: {effect}")
    variable = "NVTE_CPU_OFFLOAD_V1"
    problem = "" if environment.get(variable) in (None, "1") else "Megatron-LM rejects its own offload flags"
    fix = f"unset {variable}; `fgoffload run` does not need it"
    yield _check_variable("Megatron-LM's own check", _describe(environment, variable), problem, fix)
    variable = "CUDA_DEVICE_MAX_CONNECTIONS"
    problem = "all streams share one queue, so copies may wait for unrelated kernels"
    fix = f"unset {variable}, unless Megatron requires 1 (tensor or context parallelism before Blackwell)"
    problem = problem if environment.get(variable) == "1" else ""
    yield _check_variable("CUDA's queues", _describe(environment, variable), problem, fix)


def _check_variable(name: str, found: str, problem: str, fix: str) -> CheckResult:
    return warn(name, f"{found}: {problem}", fix) if problem else ok(name, found)


def _check_backends(environment: Mapping[str, str]) -> CheckResult:
    name = "attention allowed"
    off = [variable for variable in _BACKENDS if environment.get(variable, "1") == "0"]
    allowed = [backend for variable, backend in _BACKENDS.items() if variable not in off]
    found = ", ".join(allowed) or "none"
    if off:
        found += f" ({' '.join(f'{variable}=0' for variable in off)})"
    if not allowed:
        return fail(name, found, "unset NVTE_FUSED_ATTN: Megatron enables the backends that it needs")
    if allowed == ["unfused"]:
        fix = "unset NVTE_FUSED_ATTN: the unfused kernel saves a sequence x sequence matrix for each head"
        return warn(name, found, fix)
    return ok(name, found)


def _describe(environment: Mapping[str, str], variable: str) -> str:
    value = environment.get(variable)
    return f"{variable} is not set" if value is None else f"{variable}={value}"
