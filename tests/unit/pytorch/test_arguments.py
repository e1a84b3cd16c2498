"""Tests that invalid arguments raise one-line errors with the value, the limit and the fix."""

import pytest
import torch
from torch import nn

import fgoffload
from fgoffload import ConfigError, OffloadError, TransferConfig
from fgoffload.integrations.pytorch import devices

pytestmark = pytest.mark.quick

MODEL = nn.Sequential(nn.Linear(2, 2))
SIZES = ["min_offloaded_bytes", "window_bytes", "prefetch_bytes", "host_budget_bytes"]

INVALID = {
    "a string as the model": (lambda: fgoffload.offload("model", ["*"]), "model 'model' is not a torch.nn.Module"),
    "a pattern that is a number": (lambda: fgoffload.offload(MODEL, {1: "a"}), "pattern 1 is not a string"),
    "patterns with a number": (lambda: fgoffload.offload(MODEL, ["*", 1]), "pattern 1 is not a string"),
    "no patterns": (lambda: fgoffload.offload(MODEL, None), "modules None is not a list of globs"),
    "a config of offload": (lambda: fgoffload.offload(MODEL, ["*"], {"enabled": True}), "config {'enabled': True} is not a"),
    "a config of a block": (lambda: fgoffload.saved_tensors({}), "config {} is not a TransferConfig"),
    "a config of a tensor": (lambda: fgoffload.offload_tensor(torch.ones(1), config=1), "config 1 is not a TransferConfig"),
    "a config of an estimate": (lambda: fgoffload.estimate_savings(lambda: None, config="all"), "config 'all' is not a"),
    "text for a group": (lambda: fgoffload.saved_tensors(group_bytes="64MiB"), "group_bytes '64MiB' is not a whole number"),
    "a fraction of a byte for a group": (lambda: fgoffload.saved_tensors(group_bytes=1.5), "group_bytes 1.5 is not a whole"),
    "a device of a block": (lambda: fgoffload.saved_tensors(device="nonsense"), "device 'nonsense' is not a valid device"),
    "a device of a tensor": (
        lambda: fgoffload.offload_tensor(torch.ones(1), device="gpu0"),
        "device 'gpu0' is not a valid device",
    ),
    "a device of an estimate": (
        lambda: fgoffload.estimate_savings(lambda: None, device=1.5),
        "device 1.5 is not a valid device",
    ),
    "a list for a tensor": (lambda: fgoffload.offload_tensor([1]), "got a list. Pass a tensor"),
    "a list for a handle's tensor": (lambda: fgoffload.saved_tensors().offload_tensor([1]), "got a list. Pass a tensor"),
    "a sparse tensor": (lambda: fgoffload.offload_tensor(torch.eye(3).to_sparse()), "got a torch.sparse_coo tensor"),
    "modules without a model": (
        lambda: fgoffload.estimate_savings(lambda: None, modules=("layers",)),
        "modules \\('layers',\\) are passed without a model",
    ),
    "a tensor as forward": (lambda: fgoffload.estimate_savings(torch.ones(1)), "forward is a Tensor, which is not callable"),
    "a model of an estimate": (lambda: fgoffload.estimate_savings(lambda: None, "model", ["*"]), "model 'model' is not a"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_are_refused_immediately(case):
    call, message = INVALID[case]
    with pytest.raises(ConfigError, match=message):
        call()
    assert not MODEL._forward_pre_hooks


@pytest.mark.parametrize("value", ["1MiB", 1.5, True, torch.ones(1)], ids=repr)
@pytest.mark.parametrize("field", SIZES)
def test_a_size_that_is_not_an_integer_is_refused_with_its_field_name(field, value):
    with pytest.raises(ConfigError, match=f"^{field} .* Pass an int"):
        TransferConfig(**{field: value})


def test_a_missing_device_is_refused_on_first_use(monkeypatch):
    block = fgoffload.saved_tensors(device="cuda:99")
    with pytest.raises(OffloadError):
        block.get_engine()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device 'cuda:2' does not exist"):
        devices.make_device("cuda:2", tensors=None, host_memory=fgoffload.HostMemory.PINNED)
