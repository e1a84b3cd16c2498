"""Tests that the generation of the interface is detected by its members, and that errors name missing or unknown ones."""

import inspect
import re
import sys

import pytest
import torch
from support.megatron_stub import CLASS, MODULE, installed, make_development_interface, make_released_interface
from support.megatron_stub.training import make_config

from fgoffload import IntegrationError
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.interface import is_replaced
from fgoffload.integrations.megatron.patching.imports import load_module

PATH = f"{MODULE}.{CLASS}"
MAKERS = [make_development_interface, make_released_interface]
METHODS = [(make, name) for make in MAKERS for name, value in vars(make()).items() if name[:2] != "__"]
CONTEXT = ("__init__", "__enter__", "__exit__")


@pytest.mark.parametrize("make_interface", MAKERS)
def test_apply_replaces_every_method_and_remove_restores_the_originals(make_interface):
    interface = make_interface()
    before = dict(vars(interface))
    with installed(interface):
        names = [name for name in before if name in CONTEXT or not name.startswith("_")]
        assert not is_replaced()
        offload = megatron.apply(make_config("core_attn"))
        assert is_replaced()
        assert [name for name in names if vars(interface)[name] is before[name]] == []
        with pytest.raises(IntegrationError, match="already applied in this process"):
            megatron.apply(make_config("core_attn"))
        megatron.remove(offload)
        assert not is_replaced()
        assert dict(vars(interface)) == before
        megatron.remove(offload)  # has no effect


@pytest.mark.parametrize("make_interface", MAKERS)
def test_replaced_methods_have_the_signatures_of_the_originals(make_interface):
    interface = make_interface()
    names = [name for name in vars(interface) if name[:2] != "__" or name in ("__init__", "__enter__")]
    before = {name: list(inspect.signature(getattr(interface, name)).parameters) for name in names}
    with installed(interface):
        offload = megatron.apply(make_config("core_attn"))
        after = {name: list(inspect.signature(getattr(interface, name)).parameters) for name in names}
        offload.remove()
    assert after == before


def test_the_installed_release_has_the_methods_of_the_stub():
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface

    public = {name for name in vars(FineGrainedActivationOffloadingInterface) if name[:2] != "__"}
    stub = make_development_interface() if "group_offload" in public else make_released_interface()
    assert public == {name for name in vars(stub) if name[:2] != "__"}


@pytest.mark.parametrize(("make_interface", "name"), METHODS)
def test_a_missing_method_is_named_before_anything_is_replaced(make_interface, name):
    interface = make_interface()
    delattr(interface, name)
    before = dict(vars(interface))
    with installed(interface), pytest.raises(IntegrationError) as caught:
        megatron.apply(make_config("core_attn"))
    assert f"{PATH}.{name} " in str(caught.value)
    assert caught.match(r"Supported: megatron-core 0\.16\.1|listed in docs/reference/tested.md")
    assert dict(vars(interface)) == before


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)  # makes the import fail
    with pytest.raises(IntegrationError, match=re.escape(f"{MODULE} cannot be imported")):
        megatron.apply(make_config("core_attn"))


def test_an_unknown_parameter_is_named_before_anything_is_replaced():
    interface = make_development_interface()
    interface.reset = staticmethod(lambda process_group=None, everything=False: None)
    before = dict(vars(interface))
    with installed(interface), pytest.raises(IntegrationError, match=r"reset of Megatron-Core .* takes everything, but"):
        megatron.apply(make_config("core_attn"))
    assert dict(vars(interface)) == before


def test_calling_an_unknown_method_raises():
    interface = make_development_interface()
    interface.compress = staticmethod(lambda tensor: tensor)
    with installed(interface):
        offload = megatron.apply(make_config("core_attn"))
        with pytest.raises(IntegrationError, match=re.escape(f"{PATH}.compress, but fgoffload does not support that")):
            interface.compress(torch.ones(1))
        offload.remove()
        assert interface.compress(1) == 1


def test_call_sites_of_the_0_18_release_end_groups_by_name():
    interface = make_released_interface()
    with installed(interface):
        offload = megatron.apply(make_config("qkv_linear"))
        interface.init_chunk_handler(vp_size=None, vp_stage=None, min_offloaded_tensor_size=0, max_inflight_offloads=None)
        leaf = torch.ones(64, requires_grad=True)
        with interface(offload=True, tensor=leaf, name="qkv_linear") as entered:
            output = entered.exp()
        output = interface.group_commit((output,), name="qkv_linear", forced_released_tensors=[])
        output[0].sum().backward()
        interface.mark_not_offloadable(None)
        interface.reset()
        offloaded_bytes = offload.last_step.tags["qkv_linear"].d2h_bytes
        offload.remove()
    assert torch.equal(leaf.grad, torch.ones(64).exp())
    assert offloaded_bytes == 64 * 4


def test_the_released_interface_can_delay_groups_until_a_graph():
    interface = make_released_interface()
    with installed(interface):
        offload = megatron.apply(make_config("core_attn"))
        leaf = torch.ones(64, requires_grad=True)
        interface.init_chunk_handler(None, None, 0)
        with interface(offload=True, tensor=leaf, name="core_attn") as entered:
            output = entered.exp()
        offload.graphs.is_replaying = True
        interface.group_commit(output, name="core_attn", delay_offload=True)
        assert offload.engine.read_tags()["core_attn"].d2h_bytes == 0
        offload.flush_delayed()
        assert offload.engine.read_tags()["core_attn"].d2h_bytes == 64 * 4
        interface.forward_record(event=None)  # orders copies, which our engine does not capture
        offload.remove()


def test_a_missing_class_outside_the_interface_module_is_named(monkeypatch):
    random = load_module("megatron.core.tensor_parallel.random")
    monkeypatch.delattr(random, "CheckpointWithoutOutput")
    with installed(make_development_interface()), pytest.raises(IntegrationError, match=r"random\.CheckpointWithoutOutput "):
        megatron.apply(make_config("gdp_qkv"))
