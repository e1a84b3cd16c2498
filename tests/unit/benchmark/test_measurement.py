"""Medians, ratios and what is compared with what."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.benchmark.measurement import (
    Measurement,
    Outcome,
    Summary,
    find_quantiles,
    find_ratio,
    merge_ranks,
    summarize,
)
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting

FULL = parse_setting("recompute:full")
OURS = parse_setting("ours:core_attn")
MAIN, MEGATRON = ProcessKind.MAIN, ProcessKind.MEGATRON


def outcome(setting, *seconds, repeat=0, session=0, failure="", **numbers):
    measurement = Measurement(step_seconds=seconds, **numbers) if seconds else None
    return Outcome(setting=setting, repeat=repeat, session=session, measurement=measurement, failure=failure)


def test_quantiles_lie_between_the_two_nearest_values():
    # Of five values p20 is a fifth of the way: 0.8 of the way from the first to the second, and p80 0.2 from the fourth on.
    assert find_quantiles([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx((1.8, 3.0, 4.2))
    assert find_quantiles([7.0]) == (7.0, 7.0, 7.0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_quantiles_are_in_order_and_within_what_was_measured(seconds):
    low, middle, high = find_quantiles(seconds)
    assert min(seconds) <= low <= middle * (1 + 1e-12)
    assert middle <= high * (1 + 1e-12)
    assert high <= max(seconds)


def test_a_step_takes_as_long_as_its_slowest_rank_and_memory_is_the_fullest_ranks():
    first = Measurement(step_seconds=(1.0, 4.0), peak_allocated_bytes=10, host_bytes=3, d2h_bytes=None, window_waits=1)
    second = Measurement(step_seconds=(2.0, 3.0), peak_allocated_bytes=8, host_bytes=4, d2h_bytes=5, window_waits=1)
    merged = merge_ranks([first, second])
    assert merged.step_seconds == (2.0, 4.0)
    assert (merged.peak_allocated_bytes, merged.host_bytes, merged.d2h_bytes, merged.window_waits) == (10, 7, 5, 2)
    assert merged.peak_reserved_bytes is None
    assert merge_ranks([first]) == first


def test_the_peak_is_the_allocators_where_it_counts():
    assert Measurement(step_seconds=(1.0,), peak_allocated_bytes=7, activation_peak_bytes=3).peak_bytes == 7
    assert Measurement(step_seconds=(1.0,), activation_peak_bytes=3).peak_bytes == 3


def test_a_ratio_is_over_the_nothing_of_the_same_process_and_repeat():
    outcomes = [
        outcome(NOTHING, 2.0),
        outcome(FULL, 3.0),
        outcome(NOTHING, 4.0, repeat=1),
        outcome(FULL, 3.0, repeat=1),
        outcome(NOTHING, 8.0, repeat=1, session=1),
        outcome(OURS, 10.0, repeat=1, session=1),
    ]
    assert [find_ratio(outcomes, index) for index in range(6)] == [1.0, 1.5, 1.0, 0.75, 1.0, 1.25]


def test_where_nothing_ran_several_times_a_ratio_is_over_the_median_of_all_its_steps():
    outcomes = [
        outcome(NOTHING, 2.0, 2.0, 9.0),
        outcome(FULL, 6.0, 6.0, 8.0),
        outcome(NOTHING, 3.0, 4.0, 5.0),
        outcome(OURS, 7.0),
        outcome(NOTHING, failure="no"),
        outcome(NOTHING, 3.0),
    ]
    # Of seven steps, from 2 to 9, not of the medians of three models, and not of those around alone.
    assert [find_ratio(outcomes, index) for index in (1, 3)] == [2.0, 7.0 / 3.0]
    assert [find_ratio(outcomes, index) for index in (0, 2, 4, 5)] == [1.0, 1.0, None, 1.0]


def test_a_setting_has_no_ratio_where_nothing_did_not_run_in_its_process_and_repeat():
    outcomes = [outcome(NOTHING, 2.0), outcome(OURS, 3.0, session=1), outcome(OURS, 3.0, repeat=1)]
    assert [find_ratio(outcomes, index) for index in (1, 2)] == [None, None]


def test_a_setting_that_failed_or_whose_nothing_failed_has_no_ratio():
    outcomes = [outcome(NOTHING, failure="no"), outcome(FULL, 3.0), outcome(NOTHING, 1.0, session=1)]
    outcomes.append(outcome(FULL, session=1, failure="no"))
    assert [find_ratio(outcomes, index) for index in (0, 1, 3)] == [None, None, None]


def test_a_summary_has_all_steps_the_ratio_of_each_repeat_and_the_worst_memory():
    outcomes = [
        outcome(NOTHING, 1.0),
        outcome(OURS, 1.0, 2.0, peak_allocated_bytes=5, host_bytes=9),
        outcome(NOTHING, 2.0, repeat=1),
        outcome(OURS, 2.0, 3.0, repeat=1, peak_allocated_bytes=7, host_bytes=8),
    ]
    _, ours = summarize(outcomes, [MAIN])
    assert ours.step_seconds == (1.0, 2.0, 2.0, 3.0)
    assert ours.ratios == (1.5, 1.25)
    assert (ours.ratio, ours.seconds) == (1.375, 2.0)
    assert (ours.worst.peak_allocated_bytes, ours.worst.host_bytes) == (7, 9)


def test_nothing_has_a_summary_for_each_kind_of_process_and_sessions_of_one_kind_share_theirs():
    outcomes = [
        outcome(NOTHING, 1.0),
        outcome(FULL, failure="out of memory"),
        outcome(NOTHING, 3.0, session=1),
        outcome(OURS, 4.5, session=1),
        outcome(NOTHING, 5.0, session=2),
    ]
    found = summarize(outcomes, [MAIN, MAIN, MEGATRON])
    assert [(one.setting, one.process, one.step_seconds) for one in found] == [
        (NOTHING, MAIN, (1.0, 3.0)),
        (FULL, MAIN, ()),
        (OURS, MAIN, (4.5,)),
        (NOTHING, MEGATRON, (5.0,)),
    ]
    assert found[1].failure == "out of memory"
    assert (found[1].ratio, found[1].seconds, found[1].peak_bytes, found[1].worst) == (None, None, None, None)
    assert found[2].ratio == 1.5


def summary(*ratios):
    return Summary(setting=OURS, process=MAIN, ratios=ratios)


def test_the_interval_of_ratios_is_students_of_their_logarithms():
    logs = [math.log(1.0), math.log(1.1), math.log(1.21)]
    # The quantile 0.975 of Student's distribution with two degrees of freedom, from a table.
    reach = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    expected = (1.1 * math.exp(-reach), 1.1 * math.exp(reach))
    assert summary(1.0, 1.1, 1.21).find_interval() == pytest.approx(expected, rel=1e-5)


def test_what_is_shown_beside_an_interval_is_what_the_interval_is_around():
    # The median, 1.0, would be far from the middle of [0.934, 1.169].
    one = summary(1.0, 1.0, 1.0, 1.0, 1.0, 1.3)
    low, high = one.find_interval()
    assert one.ratio == pytest.approx(1.3 ** (1 / 6))
    assert one.ratio == pytest.approx(math.sqrt(low * high))
    assert summary(1.0, 1.0, 1.3).ratio == pytest.approx(1.3 ** (1 / 3))
    # Below three both are shown, and there is no interval.
    assert (summary(1.0, 1.3).ratio, summary(1.3).ratio, summary().ratio) == (pytest.approx(1.15), 1.3, None)


def test_fewer_than_three_repeats_have_no_interval():
    assert summary(1.0, 1.1).find_interval() is None
    assert summary().find_interval() is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8), st.floats(0.5, 2.0))
def test_an_interval_holds_the_mean_and_moves_with_the_ratios(ratios, factor):
    low, high = summary(*ratios).find_interval()
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    assert low <= mean * (1 + 1e-9)
    assert mean <= high * (1 + 1e-9)
    moved = summary(*(ratio * factor for ratio in ratios)).find_interval()
    assert moved == pytest.approx((low * factor, high * factor))
