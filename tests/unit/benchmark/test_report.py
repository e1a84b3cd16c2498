"""Tests the table, the CSV and the bitwise comparison of a benchmark."""

import csv
import io

from fgoffload.benchmark.job import Workload
from fgoffload.benchmark.measurement import Measurement, Outcome, Run, summarize
from fgoffload.benchmark.prediction import Prediction, Source
from fgoffload.benchmark.report import HEADINGS, compare_bits, format_csv, list_rows
from fgoffload.benchmark.settings import BASELINE, ProcessKind, parse_setting
from fgoffload.trainer.steps import StepResult

GIB = 2**30
FULL = parse_setting("recompute:full")
OURS = parse_setting("ours:core_attn")
MEGATRON = parse_setting("megatron:core_attn")

WORKLOAD = Workload(arguments_file="x.sh", layers=6, tokens=1000, world_size=2)


def outcome(setting, *seconds, repeat=0, session=0, failure="", bits=(), **numbers):
    measurement = Measurement(step_seconds=seconds, **numbers) if seconds else None
    return Outcome(
        run=Run(setting=setting, repeat=repeat),
        process=[ProcessKind.MAIN, ProcessKind.MEGATRON][session],
        session=session,
        measurement=measurement,
        failure=failure,
        bits=bits,
    )


OUTCOMES = [
    outcome(BASELINE, 0.4, 0.5, 0.6, peak_allocated_bytes=20 * GIB, peak_reserved_bytes=21 * GIB),
    outcome(OURS, 0.55, peak_allocated_bytes=18 * GIB, host_bytes=3 * GIB, d2h_bytes=2 * GIB, prefetch_misses=4),
    outcome(FULL, failure="rejected [bold]"),
    outcome(BASELINE, 0.5, session=1, peak_allocated_bytes=20 * GIB),
    outcome(MEGATRON, 0.75, session=1, peak_allocated_bytes=19 * GIB),
]


PREDICTIONS = {
    OURS: {
        Source.TABLE: Prediction(step_s=0.55 * 1.02, ratio=1.0625, peak_bytes=17 * GIB, static_bytes=9 * GIB),
        Source.PROFILE: Prediction(step_s=0.6, ratio=1.125, peak_bytes=16 * GIB, static_bytes=9 * GIB),
    }
}


def test_table_cells_show_measurements_with_units():
    baseline, ours, second_baseline, megatron = list_rows(summarize(OUTCOMES), WORKLOAD, PREDICTIONS)
    # p20 of 400, 500 and 600 is 400 + 0.4 x 100.
    assert baseline == (*("baseline", "500.0 (440.0 560.0)", "1.000", "-", "20.00 GiB", "-"), *("21.00 GiB", "-", "-", "2000"))
    assert ours == (
        *("ours:core_attn", "550.0 (550.0 550.0)", "1.100", "1.125", "18.00 GiB", "16.00 GiB"),
        *("-", "3.00 GiB", "2.00 GiB", "1818"),
    )
    table_only = {OURS: {Source.TABLE: PREDICTIONS[OURS][Source.TABLE]}}
    assert list_rows(summarize(OUTCOMES), WORKLOAD, table_only)[1][3:6] == ("1.062", "18.00 GiB", "17.00 GiB")
    assert second_baseline[0] == "baseline (megatron)"
    assert megatron[:3] == ("megatron:core_attn", "750.0 (750.0 750.0)", "1.500")
    assert {len(cells) for cells in (baseline, ours, second_baseline, megatron)} == {len(HEADINGS)}


def test_the_csv_has_one_row_per_run_in_bytes_and_seconds():
    rows = list(csv.DictReader(io.StringIO(format_csv(OUTCOMES, WORKLOAD, PREDICTIONS))))
    assert [(row["setting"], row["process"], row["over_baseline"]) for row in rows] == [
        ("baseline", "main", "1.0"),
        ("ours:core_attn", "main", "1.1"),
        ("recompute:full", "main", ""),
        ("baseline", "megatron", "1.0"),
        ("megatron:core_attn", "megatron", "1.5"),
    ]
    assert rows[0]["step_p20_s"] == "0.44"
    assert (rows[1]["peak_allocated_bytes"], rows[1]["host_bytes"], rows[1]["prefetch_misses"]) == (
        *(str(18 * GIB), str(3 * GIB), "4"),
    )
    assert rows[0]["tokens_per_s"] == "2000.0"
    predicted = {
        "table_step_s": "0.561",
        "table_over_baseline": "1.0625",
        "table_peak_bytes": str(17 * GIB),
        "profile_step_s": "0.6",
        "profile_over_baseline": "1.125",
        "profile_peak_bytes": str(16 * GIB),
    }
    assert {name: rows[1][name] for name in predicted} == predicted
    assert {rows[0][name] for name in predicted} == {""}
    # Without allocator statistics, the measured peak has only activations, and so does the predicted one.
    without_allocator = [outcome(BASELINE, 0.5), outcome(OURS, 0.5, activation_peak_bytes=8 * GIB)]
    row = list(csv.DictReader(io.StringIO(format_csv(without_allocator, WORKLOAD, PREDICTIONS))))[1]
    assert row["table_peak_bytes"] == str(8 * GIB)
    assert (rows[2]["failure"], rows[2]["step_p50_s"]) == ("rejected [bold]", "")


def step(loss=1.0, digest="aa"):
    return StepResult(losses=(loss,), gradient_digests={"0.weight": digest}, seconds=0.1)


def test_bits_are_compared_with_the_first_baseline_of_the_same_process():
    rows = compare_bits(
        [
            outcome(BASELINE, bits=(step(),)),
            outcome(BASELINE, bits=(step(),)),
            outcome(OURS, bits=(step(),)),
            outcome(FULL, bits=(step(digest="bb"),)),
            # Bits are compared only within one process, since another process may compute other bits.
            outcome(BASELINE, bits=(step(loss=2.0),), session=1),
            outcome(BASELINE, bits=(step(loss=2.5),), session=1),
            outcome(MEGATRON, bits=(step(loss=2.0),), session=1),
        ]
    )
    assert rows == [
        ("baseline, second run", "yes", ""),
        ("ours:core_attn", "yes", ""),
        ("recompute:full", "no", "gradients from step 1, 0.weight"),
        ("baseline, second run", "no", "losses from step 1, microbatch 1"),
        ("megatron:core_attn", "yes", ""),
    ]
