"""Tests that warnings about tags without effect give the real cause, and that bytes are counted once."""

import dataclasses
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from support.models import ALL, ROW_BYTES, ROWS, WIDTH, make_inputs, make_net
from torch import nn
from torch.utils.checkpoint import checkpoint

import fgoffload
from fgoffload.engine import KeptReason


class Wrapper(nn.Module):
    """Runs its inner linear through `run`, which adds saved-tensor hooks or a checkpoint."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.run(self.inner, self.first(hidden)).tanh()


def run_reentrant(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, hidden, use_reentrant=True)


def run_on_cpu(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(hidden)


def run_checkpoint_on_cpu(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(module, hidden, use_reentrant=False)


@pytest.mark.parametrize(
    ("run", "pattern", "message"),
    [
        (run_reentrant, "*.inner", "inside a reentrant checkpoint"),
        (run_on_cpu, "*.inner", "other saved-tensor hooks, which take precedence: `torch.autograd.graph.save_on_cpu`"),
        (run_checkpoint_on_cpu, "*.inner", "which take precedence: `torch.utils.checkpoint._checkpoint_hook`"),
        (None, "1", "other saved-tensor hooks inside a region, such as `torch.autograd.graph.save_on_cpu`, take the tensors"),
    ],
    ids=["reentrant", "below save_on_cpu", "below a checkpoint", "around save_on_cpu"],
)
def test_a_tag_without_effect_logs_one_warning_with_the_cause_after_three_forwards(run, pattern, message, caplog):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), SaveOnCpu() if run is None else Wrapper(run))
    handle = fgoffload.offload(model, {pattern: "tag"}, ALL)
    for step in range(5):
        model(make_inputs()).sum().backward()
        warnings = [line for line in caplog.records if line.levelno == logging.WARNING]
        assert len(warnings) == (step >= 2)
    assert message in warnings[0].getMessage()
    handle.close()
    assert len([line for line in caplog.records if line.levelno == logging.WARNING]) == 1


class SaveOnCpu(nn.Module):
    """Saves its tensors with hooks other than ours."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return hidden.tanh()


def test_recording_foreign_hooks_keeps_no_tensor_alive():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wrapper(lambda inner, x: checkpoint(inner, x, use_reentrant=False)))
    seen = []
    model[0].register_forward_hook(lambda module, given, output: seen.append(weakref.ref(output)))
    with fgoffload.offload(model, "*.inner", ALL):
        model(make_inputs()).sum().backward()
        assert seen[0]() is None


def test_a_block_whose_backward_runs_before_a_group_is_full_logs_a_warning(caplog):
    net, block = make_net(), fgoffload.saved_tensors(ALL, group_bytes=1 << 30, device="cpu")
    with block:
        net(make_inputs()).backward()
    assert block.stats().d2h_bytes == 0
    assert "backward used all tensors before they could be offloaded" in caplog.text


class SaveViews(nn.Module):
    """Saves a tensor twice, and each of its halves."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole = hidden * 1
        left, right = whole.chunk(2, -1)
        return left.sin() + right.cos() + (whole.sin() + whole.cos())[:, : WIDTH // 2]


@pytest.mark.parametrize("width", [WIDTH, WIDTH // 2])
def test_offloaded_bytes_and_filtered_bytes_add_up_to_the_saved_bytes(width):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), SaveViews())
    config = dataclasses.replace(ALL, keep=lambda tensor: tensor.shape == (ROWS, width))
    with fgoffload.offload(model, {"1": "views"}, config) as handle:
        model(make_inputs()).sum().backward()
        tag = handle.stats().tags["views"]
    assert tag.d2h_bytes == 0
    assert tag.kept_bytes == {KeptReason.FILTERED.value: ROW_BYTES}
