"""Checks environment variables of Transformer Engine and CUDA that affect offload."""

from collections.abc import Iterator, Mapping

from fgoffload.doctor.result import CheckResult, fail, ok, warn

_BACKENDS = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def check_environment(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the variables: one row for the attention backends, and one for each other variable."""
    yield _check_backends(environment)
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    # Not a fault, and independent of offload. It matters when two runs are compared bitwise.
    means = "may differ in the last bits from run to run; 0 makes it deterministic"
    if environment.get(variable) == "0":
        means = "is deterministic"
    yield ok("attention's backward", f"{_describe(environment, variable)}: it {means}")
    name, variable = "Megatron-LM's own check", "NVTE_CPU_OFFLOAD_V1"
    found = _describe(environment, variable)
    if environment.get(variable) in (None, "1"):
        yield ok(name, found)
    else:
        fix = f"unset {variable}; `fgoffload run` sets it when needed"
        yield warn(name, f"{found}: Megatron-LM refuses its own offload flags", fix)
    name, variable = "CUDA's queues", "CUDA_DEVICE_MAX_CONNECTIONS"
    found = _describe(environment, variable)
    if environment.get(variable) != "1":
        yield ok(name, found)
    else:
        fix = f"unset {variable}, unless Megatron asks for 1 (tensor or context parallel before Blackwell)"
        yield warn(name, f"{found}: all streams share one queue, so a copy may wait for an unrelated kernel", fix)


def _check_backends(environment: Mapping[str, str]) -> CheckResult:
    name = "attention allowed"
    off = [variable for variable in _BACKENDS if environment.get(variable, "1") == "0"]
    allowed = [backend for variable, backend in _BACKENDS.items() if variable not in off]
    found = f"{', '.join(allowed) or 'none'}{'' if not off else ' (' + ' '.join(f'{variable}=0' for variable in off) + ')'}"
    if not allowed:
        return fail(name, found, "unset NVTE_FUSED_ATTN: Megatron sets the backends that it needs")
    if allowed == ["unfused"]:
        fix = "unset NVTE_FUSED_ATTN: the unfused kernel saves a matrix of sequence x sequence a head"
        return warn(name, found, fix)
    return ok(name, found)


def _describe(environment: Mapping[str, str], variable: str) -> str:
    value = environment.get(variable)
    return f"{variable} is not set" if value is None else f"{variable}={value}"
