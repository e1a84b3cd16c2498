"""Compares the times of a layer's segments with numbers worked out by hand.

Most tests use a device with a single bottleneck: compute of 1e12 FLOP/s with infinitely fast memory, or memory of 1e9 bytes/s
with infinitely fast compute.
"""

import dataclasses

import pytest
from support.layer_times import DENSE, IDEAL, MOE, change_experts, run

from fgoffload import ConfigError
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.timing.efficiency import Efficiency


def test_matrix_products_take_2mnk_flops_and_twice_that_in_backward():
    segments = run(DENSE)
    rows = 2 * 128  # two FLOP per multiply-add; query, key and value have (4 + 2 + 2) x 8 channels
    flop = {"qkv_linear": rows * 32 * 64, "attn_proj": rows * 32 * 32, "mlp_fc1": rows * 32 * 96, "mlp_fc2": rows * 48 * 32}
    assert {name: segments[name].forward_s for name in flop} == pytest.approx({name: n / 1e12 for name, n in flop.items()})
    assert {name: segments[name].backward_s for name in flop} == pytest.approx({name: 2 * n / 1e12 for name, n in flop.items()})


def test_causal_attention_computes_half_of_all_pairs_and_2_5_times_that_in_backward():
    core = run(DENSE)["core_attn"]
    # Two products of 2 x 64 x 64 x 8 FLOP for 2 sequences and 4 heads, halved.
    assert core.forward_s == pytest.approx(2 * 2 * 64 * 64 * 8 * 2 * 4 / 2 / 1e12)
    assert core.backward_s == pytest.approx(2.5 * core.forward_s)


def test_small_windows_and_sinks_take_time_per_query_row_and_head():
    efficiency = dataclasses.replace(IDEAL, attention_row_s=1.0, sink_row_s=10.0)
    times = [run(dataclasses.replace(DENSE, has_attention_sinks=one), efficiency=efficiency) for one in (False, True)]
    assert [one["core_attn"].backward_s for one in times] == [2 * 64 * 4, 11 * 2 * 64 * 4]


def test_the_host_waits_only_before_the_dispatch_of_tokens():
    for segments in (run(change_experts(has_fused_permutation=True)), run(MOE)):
        assert {name: one.host_wait for name, one in segments.items() if one.host_wait} == {"dispatch": HostWait.KERNEL}
    assert not any(one.host_wait for one in run(DENSE).values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matmul": 0}, r"matmul 0 must be above 0 and at most 1. Use a fraction, for example 0.66."),
        ({"strided_bytes_per_s": -1.0}, r"strided_bytes_per_s -1.0 must be finite and above 0"),
        ({"host_s_per_launch": -1}, r"host_s_per_launch -1 must be finite and at least 0. Use a number, for example 2.5e-05."),
    ],
)
def test_invalid_efficiencies_are_rejected_with_field_value_and_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        Efficiency(**fields)
