"""Tests the comparison of runs with and without offload, and results merged over ranks."""

import pytest

from fgoffload.cli.comparison import RunRecord, merge_ranks
from fgoffload.cli.report import WITH, WITHOUT, build_table
from fgoffload.engine.ledger import LedgerSample
from fgoffload.engine.stats import StepStats, TagStats
from fgoffload.trainer.steps import Difference, StepResult, find_differences


def make_step(losses=(1.0, 2.0), digests=None, seconds=0.1):
    return StepResult(losses=losses, gradient_digests=digests or {"a": "11", "b": "22"}, seconds=seconds)


def test_a_last_bit_loss_difference_is_located_by_step_and_microbatch():
    after = [make_step(), make_step(losses=(1.0, 2.0000000000000004))]
    assert find_differences([make_step(), make_step()], after) == {"losses": Difference(step=2, what="microbatch 2")}


def test_the_first_parameter_with_a_different_gradient_is_named():
    before = [make_step(), make_step(digests={"a": "11", "b": "22", "c": "33"})]
    after = [make_step(), make_step(digests={"a": "11", "b": "2x", "c": "3x"})]
    assert find_differences(before, after) == {"gradients": Difference(step=2, what="b")}
    assert find_differences(before, before) == {}


def make_rank(losses, digests, *, peak_bytes, seconds=0.1, place="", stats=None, allocator=None):
    return RunRecord(
        steps=(make_step(losses=losses, digests=digests, seconds=seconds),),
        counted_step=1,
        activation_peak_bytes=peak_bytes,
        samples=(LedgerSample(0, peak_bytes, place),),
        activation_peak_place=place,
        allocator_peak_bytes=allocator,
        stats=stats,
    )


def make_stats(d2h_bytes):
    tag = TagStats(d2h_bytes=d2h_bytes, prefetch_misses=1, kept_bytes={"no elements": 2})
    return StepStats(tags={"core_attn": tag}, window_waits=1, host_peak_bytes=d2h_bytes)


def test_merged_ranks_have_all_results_and_the_worst_memory_and_time():
    merged = merge_ranks(
        [
            make_rank((), {"a": "1"}, peak_bytes=10, seconds=3.0, allocator=7, stats=make_stats(5)),
            make_rank((1.0, 2.0), {"a": "2", "b": "3"}, peak_bytes=30, place="layers.1.core_attn mb=0", allocator=5),
            make_rank((4.0,), {"a": "4"}, peak_bytes=20, stats=make_stats(6)),
        ]
    )
    (step,) = merged.steps
    assert step.losses == (1.0, 2.0, 4.0)
    assert step.gradient_digests == {"a of rank 0": "1", "a of rank 1": "2", "b of rank 1": "3", "a of rank 2": "4"}
    assert step.seconds == 3.0
    assert (merged.activation_peak_bytes, merged.samples) == (30, (LedgerSample(0, 30, "layers.1.core_attn mb=0"),))
    assert merged.activation_peak_place == "layers.1.core_attn mb=0 of rank 1"
    assert (merged.allocator_peak_bytes, merged.ranks) == (7, 3)
    tag = TagStats(d2h_bytes=11, prefetch_misses=2, kept_bytes={"no elements": 4})
    assert merged.stats == StepStats(tags={"core_attn": tag}, window_waits=2, host_peak_bytes=6)


@pytest.mark.parametrize(("before", "after", "shown"), [(100, 60, True), (100, 100, False), (10_000, 10_001, False)])
def test_an_unchanged_peak_has_no_row_for_its_reduction(before, after, shown):
    records = {label: make_rank((1.0,), {}, peak_bytes=peak) for label, peak in ((WITHOUT, before), (WITH, after))}
    assert ("  reduced by" in build_table(records, {}, "title").columns[0].cells) == shown
