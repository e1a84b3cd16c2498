"""Predicted beside measured: numbers, and the tables that show them."""

import io

import pytest
from rich.console import Console

from fgoffload.benchmark.measurement import Measurement, Summary
from fgoffload.benchmark.prediction import Forecast, Prediction, Source, compare
from fgoffload.benchmark.prediction_report import build_prediction_tables, describe_worst, format_predictions
from fgoffload.benchmark.report import Workload
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting
from fgoffload.benchmark.surroundings import Surroundings

GIB = 2**30
FULL, CORE, ROUTER, ELSEWHERE = map(parse_setting, ("recompute:full", "ours:core_attn", "ours:router", "megatron:core_attn"))
WORKLOAD = Workload(arguments_file="x.sh", layers=6, dtype="bfloat16", tokens=10, model_flop=10, world_size=1)
SURROUNDINGS = Surroundings(
    device="A device", driver=None, python="3.11", packages={"torch": "2.11"}, cuda=None, cpus=1, variables={}
)


def summary(setting, seconds, peak_gib=None, *, process=ProcessKind.MAIN, **numbers):
    peak_bytes = None if peak_gib is None else round(peak_gib * GIB)
    worst = Measurement(step_seconds=(seconds,), peak_allocated_bytes=peak_bytes, **numbers)
    return Summary(setting=setting, process=process, step_seconds=(seconds,), ratios=(seconds / 0.5,), worst=worst)


def forecast(step_s, peak_gib, static_gib=1.0, *, source=Source.TABLE, reasons=None):
    prediction = Prediction(
        step_s=step_s, ratio=step_s / 0.5, peak_bytes=round(peak_gib * GIB), static_bytes=round(static_gib * GIB)
    )
    return Forecast(predictions={source: prediction}, reasons=reasons or {})


SUMMARIES = [
    summary(NOTHING, 0.5, 20),
    summary(FULL, 1.0, 10),
    summary(CORE, 0.8, 16),
    Summary(setting=ROUTER, process=ProcessKind.MAIN, failure="out of memory"),
    summary(NOTHING, 0.625, 20, process=ProcessKind.MEGATRON),
    summary(ELSEWHERE, 0.9, 15, process=ProcessKind.MEGATRON),
]
FORECASTS = {
    NOTHING: forecast(0.5, 20.1),
    FULL: forecast(1.04, 9.4),  # 4% of time, half of its limit; 6% of the peak, 1.2 of its limit
    CORE: forecast(0.88, 16),  # 10% of time, 1.25 of its limit
    ROUTER: forecast(0.8, 16),
}


def test_errors_are_parts_of_what_was_measured_and_the_worst_in_parts_of_its_limit_comes_first():
    found = compare(SUMMARIES, FORECASTS, Source.TABLE)
    assert [(one.setting, one.process) for one in found] == [
        (NOTHING, ProcessKind.MEGATRON),
        (CORE, ProcessKind.MAIN),
        (FULL, ProcessKind.MAIN),
        (NOTHING, ProcessKind.MAIN),
    ]
    errors = [(round(one.step_error, 3), round(one.peak_error, 3), round(one.badness, 3)) for one in found]
    assert errors == [(-0.2, 0.005, 2.5), (0.1, 0.0, 1.25), (0.04, -0.06, 1.2), (0.0, 0.005, 0.1)]
    assert compare(SUMMARIES, FORECASTS, Source.PROFILE) == []


@pytest.mark.parametrize(("source", "limits"), [(Source.TABLE, (0.08, 0.05)), (Source.PROFILE, (0.04, 0.02))])
def test_a_profile_is_held_to_tighter_limits_than_the_table(source, limits):
    assert (source.limits.step, source.limits.peak) == limits


def test_where_no_allocator_counts_activations_are_compared_without_what_is_always_there():
    measured = [summary(NOTHING, 0.5, activation_peak_bytes=4 * GIB), summary(CORE, 0.8)]
    activations, unknown = sorted(compare(measured, FORECASTS, Source.TABLE), key=lambda one: one.setting.name)
    assert activations.predicted_peak_bytes == round(20.1 * GIB) - GIB
    assert activations.measured_peak_bytes == 4 * GIB
    assert unknown.peak_error is None
    assert unknown.badness == pytest.approx(0.1 / 0.08)
    page = format_predictions(measured, FORECASTS, WORKLOAD, SURROUNDINGS)
    assert "Peaks are those of activations alone" in page


def test_one_line_has_the_worst_of_both_and_whether_limits_are_kept():
    found = compare(SUMMARIES, FORECASTS, Source.TABLE)
    assert describe_worst(Source.TABLE, found) == (
        "Worst of 4 settings: step time -20.0% (nothing (megatron)), above the limit of 8%; "
        "peak -6.0% (recompute:full), above the limit of 5%."
    )
    assert describe_worst(Source.TABLE, found[3:]) == (
        "Worst of 1 setting: step time +0.0% (nothing), within the limit of 8%; peak +0.5% (nothing), within the limit of 5%."
    )


def test_a_page_has_a_table_for_each_source_and_says_what_is_missing():
    reasons = {Source.PROFILE: "nothing is known of it."}
    forecasts = FORECASTS | {NOTHING: forecast(0.49, 20, source=Source.PROFILE), FULL: forecast(1.0, 10, reasons=reasons)}
    page = format_predictions(SUMMARIES, forecasts, WORKLOAD, SURROUNDINGS)
    table, profile = page.split("## Predicted from the hardware table")[1].split("## Predicted from the profile")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ours")]
    assert rows == [["ours:core_attn", "800.0", "880.0", "+10.0%", "1.600", "1.760", "16.00 GiB", "16.00 GiB", "+0.0%"]]
    assert "| nothing | 500.0 | 490.0 | -2.0% |" in profile
    assert "Worst of 2 settings" in profile
    assert "ours:router" not in page
    assert "- `recompute:full` is not predicted from the profile: nothing is known of it." in page
    assert "Peaks are those of activations" not in page


def test_a_page_without_predictions_says_so():
    assert "Nothing was predicted" in format_predictions(SUMMARIES, {}, WORKLOAD, SURROUNDINGS)


def test_the_terminal_has_the_same_tables():
    console = Console(width=200, file=io.StringIO())
    for table in build_prediction_tables(SUMMARIES, FORECASTS):
        console.print(table)
    shown = console.file.getvalue()
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert rows == ["nothing (megatron)", "ours:core_attn", "recompute:full", "nothing"]
    assert "Worst of 4 settings" in shown
