"""Finds the version of megatron-core that the tests run with."""

import pytest

from fgoffload.integrations.megatron.patching.imports import load_module


def is_installed(versions: str) -> bool:
    """Return whether megatron-core has a version in `versions`: a minimum version, or `FIRST to LAST`."""
    installed = _read(load_module("megatron.core").__version__)
    first, _, last = versions.partition(" to ")
    return _read(first) <= installed and (not last or installed <= _read(last))


def find_graph_field() -> str:
    """Return Megatron's config field for CUDA graph modules. Set it to [], since its default "full" causes a warning."""
    return "cuda_graph_modules" if is_installed("0.19") else "cuda_graph_scope"


def _read(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


RECOMPUTES_DEPTHS = pytest.mark.skipif(
    is_installed("0.18 to 0.18"), reason="megatron-core 0.18 cannot recompute whole MTP layers"
)
