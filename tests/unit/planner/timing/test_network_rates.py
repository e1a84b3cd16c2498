"""What ranks reach of what the makers name, and what is taken where they name nothing."""

import dataclasses

import pytest

from fgoffload.planner.timing.efficiency import Efficiency, Network
from fgoffload.planner.timing.hardware import Link, get_hardware
from fgoffload.planner.timing.network_rates import describe_assumed_rates, make_network_rates

UNKNOWN = dataclasses.replace(
    get_hardware("mi300x"), nvlink_bytes_per_s=None, nvlink_peer_bytes_per_s=None, link=Link(d2h_bytes_per_s=20e9)
)


def make(hardware, network=None, **shares):
    return make_network_rates(hardware, network or Network(), Efficiency(**shares))


@pytest.mark.parametrize(
    ("name", "domain", "nvlink", "network"),
    [
        # Of H100 and H200 what was measured: 360 of 450, and 45 of 50.
        ("h100", 8, 360e9, 45e9),
        ("h200", 8, 360e9, 45e9),
        ("a100", 8, 240e9, 22.5e9),
        ("b200", 8, 720e9, 45e9),
        ("gb200", 72, 720e9, 45e9),
        ("gh200", 1, 360e9, 45e9),
    ],
)
def test_the_rates_follow_the_device(name, domain, nvlink, network):
    rates = make(get_hardware(name))
    assert (rates.domain_ranks, rates.nvlink_bytes_per_s, rates.network_bytes_per_s) == (domain, nvlink, network)
    assert rates.get_nvlink_rate(2) == nvlink


def test_devices_that_are_wired_in_pairs_reach_less_in_small_groups():
    rates = make(get_hardware("mi300x"), nvlink=1.0)
    assert [rates.get_nvlink_rate(ranks) for ranks in (1, 2, 4, 8)] == [64e9, 64e9, 3 * 64e9, 448e9]


def test_what_was_measured_counts_as_it_is():
    rates = make(get_hardware("mi300x"), Network(nvlink_bytes_per_s=1e9, network_bytes_per_s=2e9, nvlink_ranks=16))
    assert (rates.domain_ranks, rates.get_nvlink_rate(2), rates.network_bytes_per_s) == (16, 1e9, 2e9)
    partly = make(get_hardware("h100"), Network(network_bytes_per_s=2e9))
    assert (partly.domain_ranks, partly.nvlink_bytes_per_s, partly.network_bytes_per_s) == (8, 360e9, 2e9)


def test_without_nvlink_a_node_sends_over_pcie_and_without_that_over_the_network():
    rates = make(UNKNOWN, nvlink=1.0)
    assert (rates.nvlink_bytes_per_s, rates.network_bytes_per_s) == (20e9, 45e9)
    assert make(dataclasses.replace(UNKNOWN, link=Link())).nvlink_bytes_per_s == 45e9


def test_one_line_says_what_was_taken_where_it_counts():
    assert describe_assumed_rates(get_hardware("h100"), ranks=1024) is None
    assert describe_assumed_rates(get_hardware("mi300x"), ranks=8) is None
    line = (
        "hardware 'MI300X' has no network_bytes_per_s (50 GB/s is taken). "
        "A hardware file can give it: docs/planner/hardware.md."
    )
    assert describe_assumed_rates(get_hardware("mi300x"), ranks=16) == line
    assert describe_assumed_rates(UNKNOWN, ranks=1) is None
    assert "has no nvlink_bytes_per_s (20 GB/s, as over PCIe, is taken). A" in describe_assumed_rates(UNKNOWN, ranks=2)
    assert "no nvlink_bytes_per_s (20 GB/s, as over PCIe, is taken) and no network" in describe_assumed_rates(UNKNOWN, ranks=16)
