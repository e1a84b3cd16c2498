"""Tests that `fgoffload.offload` is bitwise identical for nested, repeated and separately called modules."""

import dataclasses

import pytest
import torch
from support.models import (
    ALL,
    ATTN_BYTES,
    LAYERS,
    MLP_BYTES,
    PATTERNS,
    ROW_BYTES,
    WIDTH,
    check_equal,
    copy_gradients,
    get_gradients,
    make_inputs,
    make_net,
)
from support.sites import DelayedCpuDevice, has_hooks
from torch import nn

import fgoffload
from fgoffload.engine.identity import StorageRef

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_gradients_are_bitwise_identical_and_the_saved_bytes_are_offloaded(make_device):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, PATTERNS, ALL, device=make_device()) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        tags = handle.stats().tags
    assert (tags["attn"].groups, tags["attn"].d2h_bytes) == (LAYERS, LAYERS * ATTN_BYTES)
    assert (tags["mlp"].groups, tags["mlp"].d2h_bytes) == (LAYERS, LAYERS * MLP_BYTES)
    assert tags["mlp"].h2d_bytes + tags["mlp"].recalled_bytes == LAYERS * MLP_BYTES
    assert not has_hooks()


def test_saves_outside_the_regions_do_not_keep_offloaded_storages_alive():
    class ShareStorage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = self.inner(hidden * 2)  # saves its output
            self.storage = StorageRef(output)
            return output.view(-1).sin().sum()  # saves a view of the same storage, outside

    model, inputs = ShareStorage(), make_inputs().requires_grad_()
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        loss = model(inputs)
        assert model.storage.is_freed
        loss.backward()
        tag_stats = handle.stats().tags["inner"]
    assert (tag_stats.d2h_bytes, tag_stats.held_elsewhere_bytes) == (ROW_BYTES, 0)


def test_microbatch_numbers_restart_after_stats(caplog):
    net, inputs = make_net(), make_inputs()
    caplog.set_level("DEBUG", logger="fgoffload")
    with fgoffload.offload(net, ["layers.0.attn"], ALL) as handle:
        with torch.no_grad():
            net(inputs)
        losses = [net(inputs), net(inputs)]
        sum(losses).backward()
        handle.stats()
        net(inputs).backward()
    labels = [line.message.split(":")[0] for line in caplog.records if line.message.startswith("offload layers")]
    assert labels == ["offload layers.0.attn mb=0", "offload layers.0.attn mb=1", "offload layers.0.attn mb=0"]


def test_backwards_after_several_forwards_miss_no_prefetch_once_the_order_is_known():
    net, misses = make_net(), []
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        for _ in range(2):
            losses = [net(make_inputs()) for _ in range(3)]
            while losses:
                losses.pop(0).backward()
            misses.append(handle.stats().prefetch_misses)
    assert misses[0] > misses[1] == 0


def test_a_forward_without_grad_changes_no_state():
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        with torch.no_grad():
            net(make_inputs())
        with torch.inference_mode():
            net(make_inputs())
        assert handle.engine is None
        assert handle.stats().tags == {}


@dataclasses.dataclass
class Output:
    extra: int
    hidden: torch.Tensor


WRAP = {
    "tuple": lambda hidden: (torch.ones(1), [hidden]),
    "dict": lambda hidden: {"loss": None, "hidden": hidden},
    "dataclass": lambda hidden: Output(3, hidden),
}


UNWRAP = {
    "tuple": lambda output: output[1][0],
    "dict": lambda output: output["hidden"],
    "dataclass": lambda output: output.hidden,
}


class WrapOutput(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, *, batch: dict[str, torch.Tensor]) -> object:
        return WRAP[self.kind](self.linear(batch["hidden"]).sin())


class UnwrapOutput(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = WrapOutput(kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = UNWRAP[self.inner.kind](self.inner(batch={"hidden": hidden}))
        self.marks = [len(tensor._backward_hooks or ()) for tensor in (hidden, output)]
        return output.sum()


@pytest.mark.parametrize("kind", WRAP)
def test_outputs_may_be_containers_and_inputs_may_be_keywords(kind):
    model, inputs = UnwrapOutput(kind), make_inputs().requires_grad_()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
        stats = handle.stats()
    assert stats.tags["inner"].d2h_bytes == 2 * ROW_BYTES
    assert model.marks == [1, 1]  # the marks that report the progress of backward


def test_a_module_that_runs_twice_in_one_forward_forms_two_groups():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(hidden)).sum()

    torch.manual_seed(0)
    model, inputs = Twice(), make_inputs()
    expected = get_gradients(model, lambda: model(inputs))
    with fgoffload.offload(model, ["inner"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs)))
        tag_stats = handle.stats().tags["inner"]
    # The input, the first output, which both groups save, and the second output.
    assert (tag_stats.groups, tag_stats.d2h_bytes, tag_stats.shared_bytes) == (2, 3 * ROW_BYTES, ROW_BYTES)


def test_nested_regions_are_bitwise_identical():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, {"layers.*": "layer", "layers.*.mlp": "mlp", "layers.*.attn.*": "part"}, ALL) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        assert set(handle.stats().tags) == {"layer", "mlp", "part"}


def test_layers_called_separately_can_be_grouped_into_one_forward():
    net, inputs = make_net(), make_inputs()

    def run() -> torch.Tensor:
        hidden = inputs
        for layer in net.layers:
            hidden = layer(hidden)
        return hidden.sum()

    expected = get_gradients(net, run)
    misses = {}
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        for is_one in (False, True):
            with handle.forward() if is_one else torch.enable_grad():
                loss = run()
            net.zero_grad()
            loss.backward()
            check_equal(expected, copy_gradients(net))
            misses[is_one] = handle.stats().prefetch_misses
    assert misses[True] == 3  # the three storages of the last group, which backward needs immediately
    assert misses[False] > misses[True]
