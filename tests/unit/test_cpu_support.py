"""Megatron-Core's symbols are replaced for the CPU, and come back as they were."""

import contextlib
import importlib
import logging

import pytest
import torch

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.cpu_support import apply_cpu_support, apply_local_layer_support, needs_cpu_support
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.patches import Patches

pytestmark = pytest.mark.skipif(not needs_cpu_support(), reason="a GPU needs no CPU support")
ABSENT = object()


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


def test_remove_restores_every_symbol() -> None:
    with apply_cpu_support() as support:
        names = support.names
        during = read_symbols(names)
    before = read_symbols(names)
    with apply_cpu_support():
        again = read_symbols(names)
    after = read_symbols(names)

    assert len(names) > 20
    assert all(during[name] is not before[name] for name in names)
    assert all(again[name] is not before[name] for name in names)
    assert all(after[name] is before[name] for name in names)


def test_removing_twice_does_nothing() -> None:
    support = apply_cpu_support()
    support.remove()
    zeros = torch.zeros
    support.remove()

    assert torch.zeros is zeros
    assert support.names == ()


def test_tensors_for_the_gpu_are_made_on_the_cpu() -> None:
    with apply_cpu_support():
        made = (
            torch.zeros(1, device="cuda"),
            torch.ones(1, device=torch.device("cuda", 0)),
            torch.tensor([1.0], device=torch.cuda.current_device()),
            torch.empty(1).cuda(),
        )
        module = torch.nn.Linear(1, 1).cuda()

    assert {tensor.device.type for tensor in (*made, *module.parameters())} == {"cpu"}


def test_the_gpus_random_state_is_that_of_the_cpu() -> None:
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


def test_fp8_is_off_and_asking_for_it_raises() -> None:
    random = load_module("megatron.core.tensor_parallel.random")
    with apply_local_layer_support():
        assert not random.FP8GlobalStateManager.is_fp8_enabled()
        with random.activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            pass
        with random.fp8_autocast(enabled=False, fp8_recipe=None):
            pass
        with pytest.raises(IntegrationError, match="Transformer Engine is not installed"):
            random.fp8_autocast(enabled=True, fp8_recipe=None)
        with pytest.raises(IntegrationError, match="Transformer Engine is not installed"):
            random.FP8GlobalStateManager.get_fp8_recipe()


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fgoffload"), apply_cpu_support():
        pass

    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_missing_symbol_is_named_and_nothing_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    random = load_module("megatron.core.tensor_parallel.random")
    monkeypatch.delattr(random, "_set_cuda_rng_state")
    zeros = torch.zeros

    with pytest.raises(IntegrationError, match=r"megatron\.core\.tensor_parallel\.random\._set_cuda_rng_state does not exist"):
        apply_cpu_support()

    assert torch.zeros is zeros


def test_a_missing_class_and_a_missing_module_are_named() -> None:
    with contextlib.closing(contextlib.ExitStack()):
        patches = Patches()
        with pytest.raises(IntegrationError, match=r"torch\.NoSuchClass does not exist"):
            patches.replace("torch:NoSuchClass", "cuda", None)
        with pytest.raises(IntegrationError, match=r"torch\.no_such_module cannot be imported"):
            patches.replace("torch.no_such_module", "cuda", None)
