"""Tests `fgoffload.offload` with two threads or two models, and the choice of the device."""

import contextlib
import copy
import threading
import time
import types

import pytest
import torch
from support.models import (
    ALL,
    ATTN_BYTES,
    LAYERS,
    MLP_BYTES,
    PATTERNS,
    WIDTH,
    check_equal,
    get_gradients,
    make_inputs,
    make_net,
)
from support.sites import DelayedCpuDevice
from torch import nn

import fgoffload
from fgoffload import HostMemory
from fgoffload.engine import CpuDevice
from fgoffload.integrations.pytorch import devices

pytestmark = pytest.mark.quick


def test_two_threads_can_train_with_one_handle():
    nets = [make_net(0)]
    nets.append(copy.deepcopy(nets[0]))
    batches = [make_inputs(seed) for seed in range(8)]
    expected = [torch.autograd.grad(nets[0](batch), list(nets[0].parameters())) for batch in batches]
    found: dict[int, list[torch.Tensor]] = {}
    barrier = threading.Barrier(2, timeout=30)
    with fgoffload.offload(nets[0], PATTERNS, ALL, device=DelayedCpuDevice()) as handle:

        def train(part: int) -> None:
            barrier.wait()
            for index in range(part, 8, 2):
                found[index] = torch.autograd.grad(nets[0](batches[index]), list(nets[0].parameters()))

        threads = [threading.Thread(target=train, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = handle.stats()
    assert stats.tags["attn"].groups == 8 * LAYERS
    for index, gradients in enumerate(expected):
        check_equal(gradients, found[index])


def test_two_handles_on_nested_models_are_independent():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(1)
            self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.net(self.tail(hidden))

    model, inputs = Outer(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    names = ["tail", "net.layers.*.norm"]
    with fgoffload.offload(model, names, ALL) as one, fgoffload.offload(model.net, PATTERNS, ALL) as other:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        assert set(one.stats().tags) == {"tail", "norm"}
        assert set(other.stats().tags) == {"attn", "mlp"}


def test_parameters_on_the_meta_device_do_not_determine_the_engine_device():
    with torch.device("meta"):
        net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        net.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.01)
        net(make_inputs()).backward()
        assert handle.stats().d2h_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES)


def test_the_engine_uses_the_accelerator_of_the_parameters_or_inputs(monkeypatch):
    kinds = []
    monkeypatch.setattr(devices, "find_device", lambda kind, **_: kinds.append(kind) or CpuDevice())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    on_cpu = torch.ones(1)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda", 1))
    on_meta = torch.ones(1, device="meta")
    for tensors in ([on_cpu, on_meta], [on_cpu, on_gpu], [on_meta, on_gpu, on_cpu], []):
        devices.make_device(None, tensors=tensors, host_memory=HostMemory.PINNED)
    devices.make_device("cuda:1", tensors=[on_cpu], host_memory=HostMemory.PINNED)
    assert kinds == ["cpu", "cuda", "cuda", "cpu", "cuda"]


def test_two_threads_starting_at_once_create_one_engine(monkeypatch):
    made = []

    def make_slowly(choice, *, tensors, host_memory) -> CpuDevice:
        made.append(choice)
        time.sleep(0.05)
        return CpuDevice()

    monkeypatch.setattr("fgoffload.integrations.pytorch.tensors.make_device", make_slowly)
    with fgoffload.offload(make_net(), PATTERNS, ALL) as handle:
        threads = [threading.Thread(target=handle.get_engine) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(made) == 1
