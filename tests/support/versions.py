"""Finds the version of megatron-core that the tests run with."""

import pytest

from fgoffload.integrations.megatron.patching.imports import load_module


def is_installed(versions: str) -> bool:
    """Return whether the installed megatron-core is of `versions`: a version, for it and newer ones, or `FIRST to LAST`."""
    installed = _read(load_module("megatron.core").__version__)
    first, _, last = versions.partition(" to ")
    return _read(first) <= installed and (not last or installed <= _read(last))


def find_graph_field() -> str:
    """Return the field of Megatron's config for CUDA graphs. Its default, "full", warns that it is deprecated: set it to []."""
    return "cuda_graph_modules" if is_installed("0.19") else "cuda_graph_scope"


def _read(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


RECOMPUTES_DEPTHS = pytest.mark.skipif(
    is_installed("0.18 to 0.18"), reason="megatron-core 0.18 cannot recompute whole layers of multi-token prediction"
)
