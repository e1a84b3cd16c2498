"""Shows predictions beside measurements, worst first: for the terminal, and as `predictions.md`."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.markdown import format_rows
from fgoffload.benchmark.measurement import Summary
from fgoffload.benchmark.prediction import Comparison, Forecasts, Source, compare
from fgoffload.benchmark.report import ABSENT, Workload, name_row, name_run, name_versions
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.units import format_bytes

HEADINGS = (
    "setting",
    "step ms: measured",
    "predicted",
    "error",
    "over nothing: measured",
    "predicted",
    "peak: measured",
    "predicted",
    "error",
)
"""Of a table of predictions."""

OF_ACTIVATIONS = "Peaks are those of activations alone: no allocator counts on this device."
"""Said where it is so."""


def build_prediction_tables(summaries: Sequence[Summary], forecasts: Forecasts) -> list[Table]:
    """Return a table for each source that predicted anything that was measured."""
    return [_build_table(source, found) for source, found in _compare_all(summaries, forecasts)]


def format_predictions(
    summaries: Sequence[Summary], forecasts: Forecasts, workload: Workload, surroundings: Surroundings
) -> str:
    """Return the page `predictions.md`: a table for each source, and what could not be predicted."""
    lines = [name_run(workload, surroundings), "", name_versions(surroundings), ""]
    if any(one.worst is not None and one.worst.peak_allocated_bytes is None for one in summaries):
        lines += [OF_ACTIVATIONS, ""]
    compared = _compare_all(summaries, forecasts)
    for source, found in compared:
        lines += [f"## Predicted {source.title}", "", describe_worst(source, found), ""]
        lines += [*format_rows(HEADINGS, map(_list_cells, found)), ""]
    if not compared:
        lines += ["Nothing was predicted: the hardware table does not have this device, and there is no profile.", ""]
    lines += _list_gaps(summaries, forecasts)
    return "\n".join(lines)


def describe_worst(source: Source, comparisons: Sequence[Comparison]) -> str:
    """Return one line: the largest error of step time and of peak, whose they are, and whether they keep to their limits."""
    limits = source.limits
    parts = [_describe("step time", comparisons, lambda one: one.step_error, limits.step)]
    parts.append(_describe("peak", comparisons, lambda one: one.peak_error, limits.peak))
    settings = "1 setting" if len(comparisons) == 1 else f"{len(comparisons)} settings"
    return f"Worst of {settings}: {'; '.join(part for part in parts if part)}."


def _compare_all(summaries: Sequence[Summary], forecasts: Forecasts) -> list[tuple[Source, list[Comparison]]]:
    found = ((source, compare(summaries, forecasts, source)) for source in Source)
    return [(source, comparisons) for source, comparisons in found if comparisons]


def _build_table(source: Source, comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=Text(f"predicted {source.title}, worst first"), title_justify="left", caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for one in comparisons:
        table.add_row(*map(Text, _list_cells(one)))
    table.caption = Text(describe_worst(source, comparisons))
    return table


def _list_cells(one: Comparison) -> tuple[str, ...]:
    measured_bytes = one.measured_peak_bytes
    return (
        name_row(one.setting, one.process),
        f"{1e3 * one.measured_step_s:.1f}",
        f"{1e3 * one.predicted_step_s:.1f}",
        _format_error(one.step_error),
        ABSENT if one.measured_ratio is None else f"{one.measured_ratio:.3f}",
        f"{one.predicted_ratio:.3f}",
        ABSENT if measured_bytes is None else format_bytes(measured_bytes),
        format_bytes(one.predicted_peak_bytes),
        ABSENT if one.peak_error is None else _format_error(one.peak_error),
    )


def _describe(
    what: str, comparisons: Sequence[Comparison], get_error: Callable[[Comparison], float | None], limit: float
) -> str:
    errors = [(abs(error), error, one) for one in comparisons if (error := get_error(one)) is not None]
    if not errors:
        return ""
    size, error, worst = max(errors, key=lambda found: found[0])
    kept = "within" if size <= limit else "above"
    return f"{what} {_format_error(error)} ({name_row(worst.setting, worst.process)}), {kept} the limit of {limit:.0%}"


def _list_gaps(summaries: Sequence[Summary], forecasts: Forecasts) -> Iterator[str]:
    """Yield why what was measured was not predicted, where it could have been."""
    for setting in dict.fromkeys(summary.setting for summary in summaries):
        for source, reason in forecasts[setting].reasons.items() if setting in forecasts else ():
            yield f"- `{setting.name}` is not predicted {source.title}: {reason}"


def _format_error(part: float) -> str:
    return f"{100 * part:+.1f}%"
