"""Tests the log: one line at setup, one at the end, and a warning for settings without effect."""

import dataclasses
import logging

import pytest
import torch
from support.models import ALL, LAYERS, PATTERNS, make_inputs, make_net
from support.ticking import D2H_S, H2D_S, WAIT_S, TickingCpuDevice
from torch import nn

import fgoffload
from fgoffload import TransferConfig
from fgoffload.engine import Hazard, TimeKind
from fgoffload.units import format_bytes

LOGGER = "fgoffload.integrations.pytorch"


@pytest.fixture
def take_logged(caplog):
    """Return a function that returns and clears the messages logged at a level."""
    caplog.set_level(logging.INFO, logger="fgoffload")

    def take(level: int) -> list[str]:
        found = [line.getMessage() for line in caplog.records if line.levelno == level and line.name.startswith(LOGGER)]
        caplog.clear()
        return found

    return take


def train(net: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        net(make_inputs()).backward()


def test_setup_logs_one_line_with_the_number_of_regions_per_tag(take_logged):
    handle = fgoffload.offload(net := make_net(), PATTERNS, ALL)
    assert take_logged(logging.INFO) == [f"offload of Net, regions: {LAYERS} attn, {LAYERS} mlp"]
    assert repr(handle) == "<ModelOffload of Net (tags: attn mlp), 0 B offloaded in the last step>"
    train(net)
    offloaded = format_bytes(handle.stats().d2h_bytes)
    assert repr(handle) == f"<ModelOffload of Net (tags: attn mlp), {offloaded} offloaded in the last step>"
    handle.restore_forwards()


def test_debug_logs_one_line_per_offload_and_reload_of_each_group(caplog):
    net = make_net()
    caplog.set_level(logging.DEBUG, logger="fgoffload.engine")
    with fgoffload.offload(net, {"layers.*.mlp": "mlp"}, dataclasses.replace(ALL, prefetch_bytes=0)):
        train(net)
        caplog.clear()
        train(net)
    lines = [line for line in caplog.messages if "loading group" in line]
    assert lines == [
        *(f"offloading group {layer + 1} of {LAYERS}: layers.{layer}.mlp mb=1" for layer in range(LAYERS)),
        *(f"reloading group {layer + 1} of {LAYERS}: layers.{layer}.mlp mb=1" for layer in reversed(range(LAYERS))),
    ]


def test_removal_logs_one_line_with_the_bytes_saved(take_logged):
    net = make_net()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    take_logged(logging.INFO)
    for _ in range(3):
        train(net, 2)
        handle.stats()
    handle.remove()
    handle.close()
    # 264 KiB per forward: in each of three layers, 2 + 9 tensors of 8 KiB. Tensors not yet offloaded are not counted.
    (line,) = take_logged(logging.INFO)
    assert line.startswith(
        "offload of Net ended after 6 forwards. Average per forward: 264.00 KiB saved in the regions, 264.00 KiB (100.0%) of"
    )
    assert line.endswith("Peak host memory: 264.00 KiB.")


@pytest.mark.parametrize("is_timed", [True, False])
def test_stats_include_seconds_only_if_timing_is_enabled(is_timed):
    net = make_net()
    config = dataclasses.replace(ALL, is_timed=is_timed)
    with fgoffload.offload(net, PATTERNS, config, device=TickingCpuDevice()) as handle:
        for _ in range(2):
            train(net)
            stats = handle.stats()
            for tag, storages in (("attn", 2), ("mlp", 3)):
                copies = LAYERS * storages
                wait_s = LAYERS * WAIT_S[Hazard.SOURCE_STILL_COPIED] + copies * WAIT_S[Hazard.BUFFER_UNFILLED]
                expected = {TimeKind.D2H: D2H_S * copies, TimeKind.H2D: H2D_S * copies, TimeKind.WAIT: wait_s}
                assert stats.tags[tag].seconds == (expected if is_timed else {})


def test_a_tag_that_offloads_nothing_logs_one_warning_with_the_reason(take_logged):
    net = make_net()
    with fgoffload.offload(
        net, {"layers.*.mlp": "mlp", "layers.*.norm": "norm"}, TransferConfig(host_budget_bytes=1 << 20)
    ) as handle:
        train(net)
        handle.stats()
        train(net)
        handle.stats()
    warnings = take_logged(logging.WARNING)
    assert len(warnings) == 2  # in the order of the modules
    assert warnings[1].startswith(
        "offload of Net: tag 'mlp' offloaded nothing: everything stayed on the device (216.00 KiB: below the minimum size"
    )
    assert warnings[1].endswith("which OffloadCallback also accepts, or omit the tag.")
    assert warnings[0].startswith("offload of Net: tag 'norm' offloaded nothing: everything stayed on the device (")


def test_a_handle_without_modules_or_regions_logs_a_warning(take_logged):
    net = make_net()
    with fgoffload.offload(net, config=ALL) as handle:
        train(net)
        handle.stats()
        train(net)
    (warning,) = take_logged(logging.WARNING)
    assert "no module is selected and its forward ran no `fgoffload.region`. Pass `modules` or `memory`" in warning
    with pytest.raises(fgoffload.ConfigError, match=r"no memory budget, so it has no plan\. See `handle.stats\(\)`"):
        fgoffload.explain(handle)


def test_closing_a_handle_that_no_forward_used_logs_a_warning(take_logged):
    net = make_net()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    with torch.no_grad():
        net(make_inputs())
    handle.stats()
    assert take_logged(logging.WARNING) == []
    handle.close()
    handle.close()
    (warning,) = take_logged(logging.WARNING)
    assert "offload of Net had no effect: no forward with gradients used it" in warning


def test_a_failed_step_logs_no_warning_about_settings_without_effect(take_logged):
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 3))
        handle.stats()
        assert take_logged(logging.WARNING) == []
        train(net)
    assert take_logged(logging.WARNING) == []
