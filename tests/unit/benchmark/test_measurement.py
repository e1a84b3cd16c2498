"""Tests ratios over the baseline, summaries of repeats, and merged ranks."""

import math
import statistics

import pytest

from fgoffload.benchmark.measurement import Measurement, Outcome, Run, find_ratio, find_ratio_interval, merge_ranks, summarize
from fgoffload.benchmark.settings import BASELINE, ProcessKind, parse_setting

FULL = parse_setting("recompute:full")
OURS = parse_setting("ours:core_attn")
MAIN, MEGATRON = ProcessKind.MAIN, ProcessKind.MEGATRON


def outcome(setting, *seconds, repeat=0, session=0, failure="", **numbers):
    measurement = Measurement(step_seconds=seconds, **numbers) if seconds else None
    run = Run(setting=setting, repeat=repeat)
    return Outcome(run=run, process=MAIN, session=session, measurement=measurement, failure=failure)


def test_merged_ranks_have_the_slowest_step_and_the_highest_peak():
    first = Measurement(step_seconds=(1.0, 4.0), peak_allocated_bytes=10, host_bytes=3, d2h_bytes=None, window_waits=1)
    second = Measurement(step_seconds=(2.0, 3.0), peak_allocated_bytes=8, host_bytes=4, d2h_bytes=5, window_waits=1)
    merged = merge_ranks([first, second])
    assert merged.step_seconds == (2.0, 4.0)
    assert (merged.peak_allocated_bytes, merged.host_bytes, merged.d2h_bytes, merged.window_waits) == (10, 7, 5, 2)
    assert merged.peak_reserved_bytes is None
    assert merge_ranks([first]) == first


def test_ratios_use_the_baseline_of_the_same_process_and_repeat():
    outcomes = [
        outcome(BASELINE, 2.0),
        outcome(FULL, 3.0),
        outcome(BASELINE, 4.0, repeat=1),
        outcome(FULL, 3.0, repeat=1),
        outcome(BASELINE, 8.0, repeat=1, session=1),
        outcome(OURS, 10.0, repeat=1, session=1),
    ]
    assert [find_ratio(outcomes, outcome) for outcome in outcomes] == [1.0, 1.5, 1.0, 0.75, 1.0, 1.25]


def test_a_summary_merges_steps_ratios_and_peaks_of_all_repeats():
    outcomes = [
        outcome(BASELINE, 1.0),
        outcome(OURS, 1.0, 2.0, peak_allocated_bytes=5, host_bytes=9),
        outcome(BASELINE, 2.0, repeat=1),
        outcome(OURS, 2.0, 3.0, repeat=1, peak_allocated_bytes=7, host_bytes=8),
    ]
    _, ours = summarize(outcomes)
    assert ours.step_seconds == (1.0, 2.0, 2.0, 3.0)
    assert ours.ratios == (1.5, 1.25)
    assert ours.ratio == pytest.approx(math.sqrt(1.5 * 1.25))
    assert (ours.worst.peak_allocated_bytes, ours.worst.host_bytes) == (7, 9)


def test_ratio_intervals_use_students_t_distribution_of_logarithms():
    logs = [math.log(1.0), math.log(1.1), math.log(1.21)]
    # The quantile 0.975 of Student's distribution with two degrees of freedom, from a table.
    half_width = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    expected = (1.1 * math.exp(-half_width), 1.1 * math.exp(half_width))
    assert find_ratio_interval((1.0, 1.1, 1.21)) == pytest.approx(expected, rel=1e-5)
