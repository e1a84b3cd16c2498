"""Tests that `fgoffload.estimate_savings` predicts the result of offload without copying anything."""

import dataclasses

import pytest
from support.models import (
    ALL,
    ATTN_BYTES,
    LAYERS,
    MLP_BYTES,
    PATTERNS,
    ROW_BYTES,
    ROWS,
    check_equal,
    copy_gradients,
    get_gradients,
    make_inputs,
    make_net,
)
from support.sites import has_hooks

import fgoffload
from fgoffload import ConfigError, TransferConfig
from fgoffload.engine import CpuDevice, KeptReason
from fgoffload.integrations.pytorch.estimate import OUTSIDE


class NoCopyDevice(CpuDevice):
    def copy_bytes(self, **buffers):
        raise AssertionError("bytes were copied")

    def allocate_host(self, size_bytes):
        raise AssertionError("host memory was allocated")


def test_the_estimate_matches_the_offloaded_bytes_without_copying():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, ALL, device=NoCopyDevice())
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        loss = net(inputs)
        stats = handle.stats()
        loss.backward()
    assert estimate.leaving_bytes == stats.d2h_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES)
    assert estimate.host_bytes == stats.host_peak_bytes


def test_saved_bytes_are_counted_by_storage_without_parameters():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, ALL)
    # Outside its regions, a layer saves the norm's input and its two statistics, and the sine's input. The loss saves the
    # inputs of the square and the sine. The first norm's input is the batch.
    outside_bytes = LAYERS * (2 * ROW_BYTES + 2 * ROWS * 4) + ROW_BYTES + ROWS * 4
    assert estimate.staying_bytes == {OUTSIDE: outside_bytes}
    assert estimate.saved_bytes == LAYERS * (ATTN_BYTES + MLP_BYTES) + outside_bytes
    assert estimate.percent == pytest.approx(100 * estimate.leaving_bytes / estimate.saved_bytes)


def test_without_a_model_all_tensors_saved_by_the_forward_are_measured():
    net, inputs = make_net(), make_inputs()
    estimate = fgoffload.estimate_savings(lambda: net(inputs), config=ALL, device=NoCopyDevice())
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
def test_tensors_that_would_stay_on_the_gpu_are_reported_with_the_reason(options, reason):
    net, inputs = make_net(), make_inputs()
    config = dataclasses.replace(ALL, **options)
    estimate = fgoffload.estimate_savings(lambda: net(inputs), net, {"layers.0.attn": "attn"}, config)
    assert estimate.leaving_bytes == 0
    assert estimate.host_bytes == 0
    assert estimate.staying_bytes[reason.value] == ATTN_BYTES
    assert reason.value in str(estimate)


def test_a_backward_inside_the_measured_forward_is_bitwise_identical():
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


def test_an_exception_during_the_estimate_leaves_the_model_unchanged():
    net = make_net()

    def fail() -> None:
        net(make_inputs())
        raise ValueError("user error")

    with pytest.raises(ValueError, match="user error"):
        fgoffload.estimate_savings(fail, net, PATTERNS, ALL)
    assert not has_hooks()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_wrong_pattern_is_refused_and_a_disabled_config_is_still_measured():
    net, inputs = make_net(), make_inputs()
    with pytest.raises(ConfigError, match="matches none"):
        fgoffload.estimate_savings(lambda: net(inputs), net, ["layers.*.atn"])
    config = TransferConfig(enabled=False, min_offloaded_bytes=0)
    assert fgoffload.estimate_savings(lambda: net(inputs), net, PATTERNS, config).leaving_bytes > 0
