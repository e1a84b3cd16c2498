"""`fgoffload.estimate_savings` says what offload then does, and moves nothing itself."""

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
    ROWS,
    WIDTH,
    check_equal,
    copy_gradients,
    get_gradients,
    make_inputs,
    make_net,
)
from support.sites import has_hooks
from torch import nn

import fgoffload
from fgoffload import ConfigError, TransferConfig
from fgoffload.engine import CpuDevice, KeptReason, Lane, OffloadEngine
from fgoffload.integrations.pytorch.estimate import OUTSIDE, HostlessDevice
from fgoffload.plan import Site


class CopiesNothing(CpuDevice):
    def copy_bytes(self, **buffers):
        raise AssertionError("bytes were copied")

    def allocate_host(self, size_bytes):
        raise AssertionError("host memory was taken")


def test_the_estimate_is_what_offload_then_moves_and_nothing_moves_for_it():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, ALL, device=CopiesNothing())
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        loss = net(inputs)
        stats = handle.stats()
        loss.backward()
    assert estimate.leaving_bytes == stats.d2h_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES)
    assert estimate.host_bytes == stats.host_peak_bytes


def test_the_bytes_saved_are_counted_by_storage_and_without_parameters():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, ALL)
    # A layer besides its regions: the norm's input and its two statistics, and the sine's input. The loss: the square's input,
    # and the sine's. The first norm's input is the batch.
    outside_bytes = LAYERS * (2 * ROW_BYTES + 2 * ROWS * 4) + ROW_BYTES + ROWS * 4
    assert estimate.staying_bytes == {OUTSIDE: outside_bytes}
    assert estimate.saved_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES) + outside_bytes
    assert estimate.percent == pytest.approx(100 * estimate.leaving_bytes / estimate.saved_bytes)


def test_without_a_model_everything_that_the_forward_saves_is_measured():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), config=ALL, device=CopiesNothing())
    assert estimate.leaving_bytes == estimate.saved_bytes
    assert estimate.percent == 100
    assert estimate.staying_bytes == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_offloaded_bytes": 4 * ROW_BYTES + 1}, KeptReason.TOO_SMALL),
        ({"keep": lambda tensor: True}, KeptReason.FILTERED),
        ({"host_budget_bytes": 512}, KeptReason.HOST_BUDGET),
    ],
)
def test_what_would_stay_is_said_with_the_reason(options, reason):
    net, inputs = make_net(), make_inputs()
    config = dataclasses.replace(ALL, **options)
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, {"layers.0.attn": "attn"}, config)
    assert estimate.leaving_bytes == 0
    assert estimate.host_bytes == 0
    assert estimate.staying_bytes[reason.value] == ATTN_BYTES
    assert reason.value in str(estimate)


def test_a_storage_that_two_regions_save_leaves_once():
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Tanh(), nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(hidden)).sum()

    model, inputs = Shares(), make_inputs().requires_grad_()
    estimate = fgoffload.estimate_savings(lambda: model(inputs * 2), model, ["one", "other"], ALL)
    assert estimate.leaving_bytes == estimate.saved_bytes == ROW_BYTES


def test_views_that_would_be_gathered_count_what_is_gathered():
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()
            self.inner.forward = lambda hidden: (hidden * 2)[:, :2].sin()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden).sum()

    model, inputs = Picks(), make_inputs().requires_grad_()
    estimate = fgoffload.estimate_savings(lambda: model(inputs), model, ["inner"], ALL)
    assert estimate.leaving_bytes == 512  # 2 of 64 columns: 256 bytes, in multiples of 512
    assert estimate.saved_bytes == estimate.freed_bytes == ROW_BYTES  # the rest of their storage is gone with them
    assert estimate.staying_bytes == {}
    assert estimate.percent == 100
    assert "512 B would be copied" in str(estimate)


class Sine(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sin()


class Shared(nn.Module):
    """Three regions save one storage, of which the last one's save may be another view."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Sine() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2
        return self.parts[0](hidden).sum() + self.parts[1](hidden).sum() + self.parts[2](hidden[:1]).sum()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep": lambda tensor: True}, KeptReason.FILTERED),
        ({"keep": lambda tensor: len(tensor) == 1}, KeptReason.FILTERED),  # one view stays, and the storage with it
        ({"host_budget_bytes": 512}, KeptReason.HOST_BUDGET),
        ({"min_offloaded_bytes": 2 * ROW_BYTES}, KeptReason.TOO_SMALL),
    ],
)
def test_a_storage_that_stays_is_counted_once_however_many_regions_save_it(options, reason):
    model, inputs = Shared(), make_inputs().requires_grad_()
    config = dataclasses.replace(ALL, **options)
    estimate = fgoffload.estimate_savings(lambda: model(inputs), model, ["parts.*"], config)
    assert estimate.saved_bytes == ROW_BYTES
    assert estimate.staying_bytes == {reason.value: ROW_BYTES}
    assert estimate.freed_bytes == 0


def test_what_one_region_could_not_move_and_a_later_one_takes_along_leaves():
    model, inputs = Shared(), make_inputs().requires_grad_()
    config = dataclasses.replace(ALL, min_offloaded_bytes=ROW_BYTES)
    model.parts[0], model.parts[2] = nn.Identity(), nn.Identity()

    def forward() -> torch.Tensor:
        hidden = inputs * 2
        return model.parts[1](hidden[:1]).sum() + model.parts[1](hidden).sum()

    estimate = fgoffload.estimate_savings(forward, model, ["parts.*"], config)
    assert estimate.staying_bytes == {}
    assert estimate.leaving_bytes == ROW_BYTES


def test_a_block_that_keeps_counts_a_storage_once():
    inputs = make_inputs().requires_grad_()

    def forward() -> torch.Tensor:
        hidden = inputs * 2
        return hidden.sin() + hidden.cos()

    estimate = fgoffload.estimate_savings(forward, config=dataclasses.replace(ALL, keep=lambda tensor: True), device="cpu")
    assert estimate.staying_bytes == {KeptReason.FILTERED.value: ROW_BYTES} == {KeptReason.FILTERED.value: estimate.saved_bytes}


def test_a_backward_in_the_measured_forward_is_right():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs) + (inputs @ net.layers[0].attn[0].weight)[:, :2].sin().sum())
    net.zero_grad()

    def step() -> None:
        (net(inputs) + (inputs @ net.layers[0].attn[0].weight)[:, :2].sin().sum()).backward()

    fgoffload.estimate_savings(step, net, {**PATTERNS, "layers.*": "layer"}, ALL)
    check_equal(expected, copy_gradients(net))
    net.zero_grad()
    fgoffload.estimate_savings(step, config=ALL, device="cpu")
    check_equal(expected, copy_gradients(net))


def test_blocks_of_several_types_are_not_mixed_up():
    # The 512th byte of the host's memory, and the 512th number of four bytes: two places.
    tensors = [torch.ones(128), torch.arange(1536).to(torch.uint8), torch.randn(128)]
    engine = OffloadEngine(device=HostlessDevice(CpuDevice()), host_budget_bytes=1 << 20)
    lane = Lane(chunk=0, microbatch=0)
    group = engine.open_group(Site(chunk=0, layer=0, tag="a"), lane)
    handles = [engine.save(tensor.clone(), lane=lane, group=group) for tensor in tensors]
    engine.end(lane, group)
    engine.poll()
    assert all(map(torch.equal, tensors, [handle.take() for handle in handles]))
    assert engine.finish_step().h2d_bytes == 2 * 512 + 1536


def test_the_model_is_left_as_it_was_after_an_exception_too():
    net = make_net()

    def fail() -> None:
        net(make_inputs())
        raise ValueError("somebody's own")

    with pytest.raises(ValueError, match="somebody's own"):
        fgoffload.estimate_savings(fail, net, PATTERNS, ALL)
    assert not has_hooks()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_forward_without_gradients_saves_nothing():
    net = make_net()
    with torch.no_grad():
        estimate = fgoffload.estimate_savings(lambda: net(make_inputs()), net, PATTERNS)
    assert (estimate.saved_bytes, estimate.percent) == (0, 0.0)


def test_it_refuses_what_offload_refuses_and_measures_what_is_not_enabled():
    net, inputs = make_net(), make_inputs()
    with pytest.raises(ConfigError, match="matches none"):
        fgoffload.estimate_savings(lambda: net(inputs), net, ["layers.*.atn"])
    config = TransferConfig(enabled=False, min_offloaded_bytes=0)
    assert fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, config).leaving_bytes > 0
