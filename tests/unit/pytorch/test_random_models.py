"""Tests that random models train bitwise identical with offload, and that their gradients share no additional memory."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings
from support.models import check_equal
from support.random_models import Training, make_model, trainings
from support.sites import DelayedCpuDevice, has_hooks
from torch import nn

import fgoffload
from fgoffload.engine import CpuDevice

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # from torch's own jvp


def train(training: Training, model: nn.Module, context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
    """Return the losses of all microbatches, and the gradients and buffers after them."""
    losses, pending = [], []
    for number in range(training.microbatches):
        torch.manual_seed(number)
        x = torch.randn(8, 8, requires_grad=True) * 1
        with context:
            loss = model(x).sum()
        losses.append(loss.detach().clone())
        pending.append(loss)
        if not training.is_backward_late:
            run_backward(pending, training)
    run_backward(pending, training)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.buffers()]


def run_backward(pending: list[torch.Tensor], training: Training) -> None:
    while pending:
        loss = pending.pop(0)
        loss.backward(retain_graph=training.retains_graph)
        if training.retains_graph:
            loss.backward()


def list_shared(model: nn.Module) -> set[tuple[str, str]]:
    """Return the gradients that share memory with a parameter, a buffer or another gradient."""
    owners = {name: tensor for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())}
    gradients = {f"{name}.grad": tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return {
        (name, other)
        for (name, gradient), (other, tensor) in itertools.product(gradients.items(), {**owners, **gradients}.items())
        if name != other and gradient.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    }


def check(training: Training, device: CpuDevice) -> None:
    plain = make_model(training)
    try:
        expected = train(training, plain, contextlib.nullcontext())
    except RuntimeError as error:
        event(str(error)[:60])
        reject()  # torch refuses this model, for example an in-place change of a saved tensor; offload may refuse it or not
    count = itertools.count()
    keep = (lambda tensor: next(count) % training.keeps_every == 0) if training.keeps_every else None
    config = fgoffload.TransferConfig(
        min_offloaded_bytes=0,
        window_bytes=training.window_bytes,
        prefetch_bytes=training.prefetch_bytes,
        host_budget_bytes=training.host_budget_bytes,
        keep=keep,
    )
    model = make_model(training)
    names = {name for name, _ in model.named_modules()}
    patterns = [pattern for pattern in training.patterns if "*" in pattern or pattern in names]
    block: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if patterns:
        handle = fgoffload.offload(model, patterns, config, device=device)
    else:
        handle = block = fgoffload.saved_tensors(config, device=device, group_bytes=training.group_bytes)
    found = train(training, model, block)
    event("offloaded" if handle.stats().d2h_bytes else "kept")
    check_equal(expected, found)
    assert list_shared(model) <= list_shared(plain)
    assert not has_hooks()
    assert handle.engine is None or handle.engine.arena.used_bytes == 0
    handle.close()


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(trainings())
def test_random_models_train_as_in_plain_torch(training):
    check(training, CpuDevice())


@pytest.mark.slow
@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice])
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(trainings())
def test_thousands_of_random_models_train_as_in_plain_torch(make_device, training):
    check(training, make_device())
