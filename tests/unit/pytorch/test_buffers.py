"""Tests that buffers stay on the GPU, since batch norm updates its statistics without a version change."""

import copy

import pytest
import torch
from support.models import ALL, WIDTH, check_equal, make_inputs
from support.sites import DelayedCpuDevice
from torch import nn

import fgoffload
from fgoffload.engine import KeptReason


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def keep_older_graph(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.eval()
    older = model(inputs)
    model.train()
    with torch.no_grad():
        model(3 * inputs + 1)
    model.eval()
    return model(inputs).square().sum() + 0 * older.detach().sum() + 0 * older.sum()


def change_model_between_forwards(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.double()
    before = model.eval()(inputs.double())
    model[1].running_mean = model[1].running_mean.clone()
    between = model(inputs.double())
    model.train()(3 * inputs.double() + 1)
    return (model.eval()(inputs.double()).square() + before.sin() * between).sum()


def train_a_copy(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    other = copy.deepcopy(model)
    keep_older_graph(model, inputs).backward()
    loss = keep_older_graph(other, inputs)
    loss.backward()
    return model(inputs).sum() * other[0].weight.grad.sum().item()


def swap_buffers(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    swapped = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(batch: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, swapped, (batch,))

    model.eval()
    older = run(inputs)
    model.train()
    run(3 * inputs + 1)
    model.eval()
    return (run(inputs).sin() + older).sum()


SEQUENCES = [keep_older_graph, change_model_between_forwards, train_a_copy, swap_buffers]


def run(sequence, *, is_offloaded: bool, device=None) -> list[torch.Tensor]:
    model, inputs = make_model(), make_inputs()
    handle = fgoffload.offload(model, ["*"], ALL, device=device) if is_offloaded else None
    sequence(model, inputs).backward()
    if handle is not None:
        assert handle.stats().d2h_bytes > 0
    return [
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        model[1].running_mean,
        model[1].running_var,
    ]


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.__name__)
def test_gradients_through_running_statistics_are_bitwise_identical(sequence):
    check_equal(run(sequence, is_offloaded=False), run(sequence, is_offloaded=True, device=DelayedCpuDevice()))


def test_running_statistics_changed_during_a_forward_are_bitwise_identical():
    class Toggles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            first = self.norm.eval()(hidden)
            second = self.norm.train()(3 * hidden + 1)
            return (first.sin() + second.sin() + self.norm.eval()(hidden).sin()).sum()

    def step(*, is_offloaded: bool) -> torch.Tensor:
        model, inputs = Toggles(), make_inputs().requires_grad_()
        if is_offloaded:
            fgoffload.offload(model, ["norm"], ALL)
        model(inputs).backward()
        return inputs.grad

    check_equal([step(is_offloaded=False)], [step(is_offloaded=True)])


def test_a_buffer_saved_in_a_region_is_counted_as_marked_to_be_kept():
    model = make_model().eval()
    with fgoffload.offload(model, {"1": "norm"}, ALL) as handle:
        model(make_inputs()).sum().backward()
        assert handle.stats().tags["norm"].kept_bytes[KeptReason.MARKED.value] == 2 * WIDTH * 4
