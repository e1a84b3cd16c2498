"""Tests the derived window and prefetch sizes: they depend on the model's offloaded bytes, and lower its peak."""

import pytest
from support.models import ATTN_BYTES, MLP_BYTES, check_equal, get_gradients, make_inputs, make_net
from support.sites import DelayedCpuDevice

import fgoffload
from fgoffload import TransferConfig
from fgoffload.engine import ActivationLedger, CpuDevice
from fgoffload.units import GIB, MIB

LAYERS = 16
TOTAL_BYTES = LAYERS * (ATTN_BYTES + MLP_BYTES)
DEFAULT = TransferConfig(min_offloaded_bytes=0)
PATTERNS = ["layers.*.attn", "layers.*.mlp"]


@pytest.mark.parametrize(
    ("offloaded_bytes", "largest_group_bytes", "window_bytes", "prefetch_bytes"),
    [
        (None, 0, 1 * GIB, 512 * MIB),
        (20 * GIB, 64 * MIB, 1 * GIB, 512 * MIB),
        (20 * GIB, 600 * MIB, 1 * GIB, 600 * MIB),  # one group, regardless of its size
        (20 * GIB, 2 * GIB, 2 * GIB, 2 * GIB),
        (200 * MIB, 16 * MIB, 50 * MIB, 50 * MIB),
        (200 * MIB, 64 * MIB, 64 * MIB, 64 * MIB),
    ],
)
def test_sizes_are_a_quarter_of_the_offloaded_bytes_between_one_group_and_the_default(
    offloaded_bytes, largest_group_bytes, window_bytes, prefetch_bytes
):
    policy = TransferConfig().derive_policy(offloaded_bytes=offloaded_bytes, largest_group_bytes=largest_group_bytes)
    assert (policy.window_bytes, policy.prefetch_bytes) == (window_bytes, prefetch_bytes)


@pytest.mark.parametrize("name", ["window_bytes", "prefetch_bytes"])
@pytest.mark.parametrize("size_bytes", [0, 3 * GIB])
def test_an_explicit_size_is_not_changed(name, size_bytes):
    policy = TransferConfig(**{name: size_bytes}).derive_policy(offloaded_bytes=200 * MIB, largest_group_bytes=16 * MIB)
    other = {"window_bytes", "prefetch_bytes"} - {name}
    assert getattr(policy, name) == size_bytes
    assert getattr(policy, other.pop()) == 50 * MIB


def measure_peak(net, offloaded, run):
    """Return the gradients, and the peak of activation bytes on the device during backward."""
    ledger = ActivationLedger(parameters=net.parameters())
    with offloaded.get_engine().observe(ledger), ledger.watch():
        loss = run()
        before = len(ledger.samples)
        gradients = get_gradients(net, lambda: loss)
    return gradients, max(sample.resident_bytes for sample in ledger.samples[before:])


def run_steps(config, *, is_block, steps=4):
    """Return the peak of each step's backward, and check that all gradients are bitwise identical."""
    net, inputs, peaks = make_net(layers=LAYERS), make_inputs(), []
    expected = get_gradients(net, lambda: net(inputs))
    if is_block:
        offloaded = fgoffload.saved_tensors(config, device=CpuDevice())
    else:
        offloaded = fgoffload.offload(net, PATTERNS, config, device=CpuDevice())

    def run():
        if not is_block:
            return net(inputs)
        with offloaded:
            return net(inputs)

    for _ in range(steps):
        gradients, peak = measure_peak(net, offloaded, run)
        check_equal(expected, gradients)
        peaks.append(peak)
    offloaded.close()
    return peaks


@pytest.mark.parametrize("is_block", [False, True], ids=["modules", "block"])
def test_derived_sizes_lower_the_peak_of_a_small_model(is_block):
    fixed = run_steps(TransferConfig(min_offloaded_bytes=0, prefetch_bytes=512 * MIB), is_block=is_block)
    derived = run_steps(DEFAULT, is_block=is_block)
    assert min(fixed) > 0.9 * TOTAL_BYTES  # everything is reloaded at once
    assert derived[-1] < 0.5 * fixed[-1]
    assert is_block or derived[0] == derived[-1]  # with modules, even the first backward uses derived sizes


def test_the_derived_window_limits_a_small_model_from_the_second_forward():
    net, inputs, waits = make_net(layers=LAYERS), make_inputs(), []
    with fgoffload.offload(net, PATTERNS, DEFAULT, device=DelayedCpuDevice()) as handle:
        for _ in range(3):
            net(inputs).backward()
            waits.append(handle.stats().window_waits)
    assert waits[0] == 0 < min(waits[1:])


def test_group_bytes_do_not_change_in_a_forward_that_offloads_nothing():
    net = make_net(layers=1)
    with fgoffload.offload(net, PATTERNS, DEFAULT, device=CpuDevice()) as handle:
        net(make_inputs()).backward()
        assert handle.group_bytes == MLP_BYTES // 4  # a quarter of the prefetch size, which is the larger of the two groups
        net.requires_grad_(requires_grad=False)
        net(make_inputs())
        assert handle.group_bytes == MLP_BYTES // 4
