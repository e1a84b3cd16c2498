"""Checks environment variables of Transformer Engine and CUDA that affect offload."""

from collections.abc import Iterator, Mapping

from fgoffload.doctor.result import CheckResult, Status

_BACKENDS = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def check_environment(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the variables: one row for the attention backends, and one for each other variable."""
    yield _check_backends(environment)
    yield _check_determinism(environment)
    yield _check_switch(environment)
    yield _check_connections(environment)


def _check_backends(environment: Mapping[str, str]) -> CheckResult:
    name = "attention allowed"
    off = [variable for variable in _BACKENDS if environment.get(variable, "1") == "0"]
    allowed = [backend for variable, backend in _BACKENDS.items() if variable not in off]
    found = f"{', '.join(allowed) or 'none'}{'' if not off else ' (' + ' '.join(f'{variable}=0' for variable in off) + ')'}"
    if not allowed:
        return CheckResult(
            name=name, status=Status.ERROR, found=found, fix="unset NVTE_FUSED_ATTN: Megatron sets the backends that it needs"
        )
    if allowed == ["unfused"]:
        return CheckResult(
            name=name,
            status=Status.WARNING,
            found=found,
            fix="unset NVTE_FUSED_ATTN: the unfused kernel saves a matrix of sequence x sequence a head",
        )
    return CheckResult(name=name, status=Status.OK, found=found)


def _check_determinism(environment: Mapping[str, str]) -> CheckResult:
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    value = environment.get(variable, "1")
    # Not a fault, and independent of offload. It matters when two runs are compared bitwise.
    means = "is deterministic" if value == "0" else "may differ in the last bits from run to run; 0 makes it deterministic"
    return CheckResult(name="attention's backward", status=Status.OK, found=f"{_describe(environment, variable)}: it {means}")


def _check_switch(environment: Mapping[str, str]) -> CheckResult:
    name, variable = "Megatron-LM's own check", "NVTE_CPU_OFFLOAD_V1"
    found = _describe(environment, variable)
    if environment.get(variable) not in (None, "1"):
        return CheckResult(
            name=name,
            status=Status.WARNING,
            found=f"{found}: Megatron-LM refuses its own offload flags",
            fix=f"unset {variable}; `fgoffload run` sets it when needed",
        )
    return CheckResult(name=name, status=Status.OK, found=found)


def _check_connections(environment: Mapping[str, str]) -> CheckResult:
    name, variable = "CUDA's queues", "CUDA_DEVICE_MAX_CONNECTIONS"
    found = _describe(environment, variable)
    if environment.get(variable) == "1":
        return CheckResult(
            name=name,
            status=Status.WARNING,
            found=f"{found}: all streams share one queue, so a copy may wait for an unrelated kernel",
            fix=f"unset {variable}, unless Megatron asks for 1 (tensor or context parallel before Blackwell)",
        )
    return CheckResult(name=name, status=Status.OK, found=found)


def _describe(environment: Mapping[str, str], variable: str) -> str:
    value = environment.get(variable)
    return f"{variable} is not set" if value is None else f"{variable}={value}"
