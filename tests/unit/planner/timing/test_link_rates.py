"""The link to the host as the simulator has it: measured rates as they are, makers' in part."""

import dataclasses

import pytest

from fgoffload import ConfigError
from fgoffload.planner.timing.hardware import Link, get_hardware
from fgoffload.planner.timing.link_rates import make_link_model


def test_both_ways_at_once_are_a_part_of_the_slower_way_where_nobody_measured_them():
    measured = get_hardware("h200")
    one_way = dataclasses.replace(measured, link=dataclasses.replace(measured.link, duplex_bytes_per_s=None))
    link = make_link_model(one_way)
    assert (link.d2h_bytes_per_s, link.h2d_bytes_per_s) == (55.1e9, 54.5e9)
    assert link.duplex_bytes_per_s == pytest.approx(54.5e9 * 33.5 / 47)
    assert make_link_model(measured).duplex_bytes_per_s == 50.5e9


def test_a_makers_rates_count_in_part():
    # 32 GB/s each way, half of an H100's 64, of which one reached 47, 53 and 33.5.
    link = make_link_model(get_hardware("a100"))
    assert link.d2h_bytes_per_s == pytest.approx(23.5e9)
    assert link.h2d_bytes_per_s == pytest.approx(26.5e9)
    assert link.duplex_bytes_per_s == pytest.approx(16.75e9)


@pytest.mark.parametrize(
    ("hardware", "field"),
    [
        (get_hardware("ascend-910b"), "d2h_bytes_per_s"),
        (dataclasses.replace(get_hardware("h100"), link=Link(d2h_bytes_per_s=1e9, is_measured=True)), "h2d_bytes_per_s"),
    ],
)
def test_a_link_that_is_not_known_is_refused_with_the_fix(hardware, field):
    with pytest.raises(ConfigError, match=rf"{hardware.name}' has no {field} of its link, .*a hardware file that has it, or"):
        make_link_model(hardware)
