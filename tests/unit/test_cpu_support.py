"""Tests that Megatron-Core's symbols are replaced for the CPU, and restored."""

import importlib
from pathlib import Path

import pytest
import torch

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches

pytestmark = pytest.mark.skipif(not needs_cpu_support(), reason="a GPU needs no CPU support")
ABSENT = object()
ALREADY_SET = {
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": None,
    "megatron.core.transformer.multi_latent_attention.HAVE_TE": False,
}
"""Symbols that newer versions already set to the replacement without Transformer Engine."""


def read_symbols(names: tuple[str, ...]) -> dict[str, object]:
    symbols = {}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        try:
            target = importlib.import_module(owner)
        except ModuleNotFoundError:
            module, _, class_name = owner.rpartition(".")
            target = getattr(importlib.import_module(module), class_name)
        symbols[name] = vars(target).get(attribute, ABSENT)
    return symbols


def test_remove_restores_every_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    names, define = [], Patches.define

    def record(patches: Patches, owner: str, name: str, value: object) -> None:
        names.append(f"{owner.replace(':', '.')}.{name}")
        define(patches, owner, name, value)

    with monkeypatch.context() as patched:
        patched.setattr(Patches, "define", record)
        support = apply_cpu_support()
    with support:
        during = read_symbols(names)
    before = read_symbols(names)
    with apply_cpu_support():
        again = read_symbols(names)
    after = read_symbols(names)

    assert len(names) > 20
    needed = [name for name in names if name not in ALREADY_SET or before[name] is not ALREADY_SET[name]]
    assert [name for name in needed if during[name] is before[name]] == []
    assert [name for name in needed if again[name] is before[name]] == []
    assert [name for name in names if after[name] is not before[name]] == []


def test_the_gpu_random_state_uses_the_cpu_generator() -> None:
    random = load_module("megatron.core.tensor_parallel.random")
    with apply_cpu_support():
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        random._set_cuda_rng_state(state)
        second = torch.rand(3)
        torch.manual_seed(7)
        third = torch.rand(3)

    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_a_missing_symbol_is_named_and_all_patches_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    random = load_module("megatron.core.tensor_parallel.random")
    monkeypatch.delattr(random, "_set_cuda_rng_state")
    zeros = torch.zeros

    with pytest.raises(IntegrationError, match=r"megatron\.core\.tensor_parallel\.random\._set_cuda_rng_state does not exist"):
        apply_cpu_support()

    assert torch.zeros is zeros


def test_a_missing_dependency_of_megatron_core_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IntegrationError, match=r"No module named 'triton'\. Megatron-Core needs triton: pip install triton\."):
        load_module("needs_triton")
