"""Tests code that is valid in plain torch, on a device that copies while forward runs."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import fgoffload

N = 2048
ALL = fgoffload.TransferConfig(min_offloaded_bytes=0)

pytestmark = pytest.mark.usefixtures("_deterministic")


class WritesLogits(torch.autograd.Function):
    """Overwrites its input with its gradient without a version bump, as a Triton kernel does."""

    @staticmethod
    def forward(ctx, logits):
        loss = logits.logsumexp(-1).sum()
        logits.data.copy_(logits.detach().softmax(-1))
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient


class Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, buffer):
        ctx.save_for_backward(buffer)
        return (weight * buffer).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def write_logits(x, context):
    with context:
        logits = x * 2
        log = logits.cosh()
        _ = log.sin()  # the logits are being copied to the host now
        return WritesLogits.apply(logits)


def noise(x, context):
    torch.manual_seed(0)
    with context:
        return functional.rrelu(functional.rrelu(x * 2, training=True).sin(), training=True).sum()


def transforms(x, context):
    with context:
        value, tangent = torch.func.jvp(lambda v: (v.sin() * x).cos(), (x.detach(),), (torch.ones_like(x),))
        inner = torch.func.grad(lambda v: v.sin().sum())(x.detach())
        return (value + tangent + inner * x).sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # raised inside jvp
@pytest.mark.parametrize("step", [write_logits, noise, transforms])
def test_gradients_match_plain_torch(step):
    def run(context):
        x = torch.linspace(-1, 1, N * N, device="cuda").view(N, N).requires_grad_()
        step(x, context).backward()
        return x.grad

    expected = run(contextlib.nullcontext())
    block = fgoffload.saved_tensors(ALL, group_bytes=1)
    for _ in range(3):
        assert torch.equal(expected, run(block))
    block.close()


def test_scaling_a_gradient_in_place_does_not_change_buffers():
    weight, buffer = nn.Parameter(torch.ones(N, N, device="cuda")), torch.ones(N, N, device="cuda")
    block = fgoffload.saved_tensors(ALL, group_bytes=1)
    with block:
        loss = Dot.apply(weight, buffer)
    loss.backward()
    weight.grad.mul_(2)
    assert torch.equal(buffer, torch.ones_like(buffer))
    block.close()
