"""Tests the simulator's link rates: measured rates are used unchanged, vendor rates are scaled down."""

import dataclasses

import pytest

from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.link_rates import make_link_model


def test_an_unmeasured_duplex_rate_is_a_fraction_of_the_slower_direction():
    measured = get_hardware("h200")
    one_way = dataclasses.replace(measured, link=dataclasses.replace(measured.link, duplex_bytes_per_s=None))
    link = make_link_model(one_way)
    assert (link.d2h_bytes_per_s, link.h2d_bytes_per_s) == (55.1e9, 54.5e9)
    assert link.duplex_bytes_per_s == pytest.approx(54.5e9 * 33.5 / 47)
    assert make_link_model(measured).duplex_bytes_per_s == 50.5e9


def test_vendor_rates_are_scaled_down():
    # 32 GB/s in each direction, half of an H100's 64, which reached 47, 53 and 33.5 when measured.
    link = make_link_model(get_hardware("a100"))
    assert link.d2h_bytes_per_s == pytest.approx(23.5e9)
    assert link.h2d_bytes_per_s == pytest.approx(26.5e9)
    assert link.duplex_bytes_per_s == pytest.approx(16.75e9)
