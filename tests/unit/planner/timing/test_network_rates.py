"""What ranks reach of what the makers name, and what is taken where they name nothing."""

import pytest

from fgoffload.planner.timing.efficiency import Efficiency, Network
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.network_rates import make_network_rates


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
