"""Tests `fgoffload.region`: regions placed by hand in a model's code."""

import gc
from collections.abc import Callable

import pytest
import torch
from support.models import ALL, ROW_BYTES, WIDTH, check_equal, get_gradients, make_inputs
from support.sites import DelayedCpuDevice, has_hooks
from torch import nn
from torch.utils.checkpoint import checkpoint

import fgoffload
from fgoffload import ConfigError, StateError
from fgoffload.engine import Group

pytestmark = pytest.mark.quick


class PlacedRegions(nn.Module):
    """Places a region around each of two layers, and calls `end` if `calls_end`."""

    def __init__(self, *, calls_end: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls_end = calls_end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with fgoffload.region(hidden, "linear") as region:
                output = layer(hidden).tanh()
                if self.calls_end:
                    region.end(output)
            self.end_marks = len(output._backward_hooks or ())
            hidden = output * 3
        return hidden.sum()


def make_model(**options: bool) -> PlacedRegions:
    torch.manual_seed(0)
    return PlacedRegions(**options)


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
@pytest.mark.parametrize("calls_end", [True, False])
def test_hand_placed_regions_in_an_offloaded_model_are_bitwise_identical(calls_end, make_device):
    model, inputs = make_model(calls_end=calls_end), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    with fgoffload.offload(model, config=ALL, device=make_device()) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        tag_stats = handle.stats().tags["linear"]
    assert model.end_marks == calls_end
    assert (tag_stats.groups, tag_stats.d2h_bytes) == (2, 2 * 2 * ROW_BYTES)  # the input and the output of the linear
    assert not has_hooks()


def test_a_region_in_a_block_is_a_separate_group_between_the_blocks_groups():
    model, inputs = make_model(), make_inputs()

    def forward() -> torch.Tensor:
        return (model(inputs * model.layers[0].bias.sin()) + inputs.sum()).sin()

    expected = get_gradients(model, forward)
    block = fgoffload.saved_tensors(ALL, device="cpu")

    def run() -> torch.Tensor:
        with block:
            return forward()

    check_equal(expected, get_gradients(model, run))
    tags = block.stats().tags
    assert tags["linear"].d2h_bytes == 2 * 2 * ROW_BYTES
    assert tags["saved"].groups == 2  # the batch before the regions, and the last sine's input after them
    block.close()


def test_a_region_does_nothing_outside_the_forward_of_a_handle():
    model, inputs = make_model(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    with fgoffload.offload(nn.Linear(2, 2), config=ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        assert handle.engine is None
    with torch.no_grad():
        model(inputs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_region_inside_a_checkpoint_does_nothing(use_reentrant):
    model, inputs = make_model(), make_inputs().requires_grad_()

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, hidden, use_reentrant=use_reentrant)

    outer = Recomputes()
    expected = get_gradients(outer, lambda: outer(inputs * 2))
    with fgoffload.offload(outer, config=ALL) as handle:
        check_equal(expected, get_gradients(outer, lambda: outer(inputs * 2)))
        assert handle.stats().tags == {}


def run_in_forward(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with fgoffload.saved_tensors(ALL, device="cpu"):
        function(make_inputs().requires_grad_() * 2)


def test_calling_end_after_the_region_is_refused():
    def function(hidden: torch.Tensor) -> torch.Tensor:
        with fgoffload.region(hidden, "sine") as region:
            output = hidden.sin()
        region.end(output)
        return output

    with pytest.raises(StateError, match="`end` of region 'sine' was called after its block"):
        run_in_forward(function)


@pytest.mark.parametrize("is_nested", [True, False])
def test_entering_a_region_twice_is_refused_and_leaves_no_hooks(is_nested):
    hidden = make_inputs().requires_grad_() * 2
    with fgoffload.saved_tensors(ALL, device="cpu") as block:
        region = fgoffload.region(hidden, "sine")
        with pytest.raises(StateError, match="region 'sine' was already entered"):
            enter_twice(region, is_nested=is_nested)
        with fgoffload.region(hidden, "other"):
            hidden.sin().sum().backward()
    assert block.stats().tags["sine"].groups == 1  # the second entry did nothing
    assert not has_hooks()


def enter_twice(region: fgoffload.PlacedRegion, *, is_nested: bool) -> None:
    with region:
        if is_nested:
            with region:
                pass
    with region:
        pass


@pytest.mark.parametrize("output", ["text", (torch.ones(1),), None], ids=["string", "tuple", "None"])
def test_calling_end_without_a_tensor_is_refused(output):
    region = fgoffload.region(torch.ones(1), "sine")
    with pytest.raises(ConfigError, match=f"`end` of region 'sine' got a {type(output).__name__}"):
        region.end(output)


def test_regions_in_a_training_loop_inside_one_block_start_a_new_lane_each_step():
    model, inputs = make_model(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    groups = []
    with fgoffload.saved_tensors(ALL, device="cpu") as block:
        for _ in range(3):
            check_equal(expected, get_gradients(model, lambda: model(inputs)))
            groups.append(sum(type(found) is Group for found in gc.get_objects()))
    assert max(groups) == groups[0]  # groups of earlier tests may be freed meanwhile
    assert block.stats().tags["linear"].d2h_bytes > 0


@pytest.mark.parametrize(("tensor", "tag", "message"), [([1], "a", "got a list"), (torch.ones(1), "a b", "not an identifier")])
def test_an_invalid_tensor_or_tag_is_refused_even_outside_a_forward(tensor, tag, message):
    with pytest.raises(ConfigError, match=message):
        fgoffload.region(tensor, tag)
