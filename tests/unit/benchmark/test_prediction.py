"""Predicted beside measured: numbers, and the tables that show them."""

from fgoffload.benchmark.measurement import Measurement, Summary
from fgoffload.benchmark.prediction import Forecast, Prediction, Source, compare
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting

GIB = 2**30
FULL, CORE, ROUTER, ELSEWHERE = map(parse_setting, ("recompute:full", "ours:core_attn", "ours:router", "megatron:core_attn"))


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
