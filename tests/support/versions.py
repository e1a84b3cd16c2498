"""Which megatron-core the tests run with."""

from fgoffload.integrations.megatron.imports import load_module


def is_installed(since: str) -> bool:
    """Return whether the installed megatron-core is of version `since` or newer."""
    return _read(load_module("megatron.core").__version__) >= _read(since)


def _read(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
