"""Formats the results of a benchmark: tables for the terminal, CSV and JSON."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.job import Workload
from fgoffload.benchmark.measurement import Measurement, Outcome, Summary, find_quantiles, find_ratio, find_ratio_interval
from fgoffload.benchmark.prediction import Prediction, Predictions, Source
from fgoffload.benchmark.settings import BASELINE, ProcessKind, Setting, System
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.trainer.steps import find_differences
from fgoffload.units import format_bytes

ABSENT = "-"

HEADINGS = (
    "setting",
    "step ms (p20 p80)",
    "over baseline",
    "simulated",
    "peak",
    "simulated peak",
    "reserved",
    "host",
    "to host per step",
    "tokens/s",
)

_INTERVALS = "Over baseline: the geometric mean of all repeats, with its 95% confidence interval."


def list_rows(summaries: Sequence[Summary], workload: Workload, predictions: Predictions) -> list[tuple[str, ...]]:
    """Return a row of cells under `HEADINGS` for each measured setting. Prefer predictions from a profile."""
    source = Source.PROFILE if any(Source.PROFILE in own for own in predictions.values()) else Source.TABLE
    rows: list[tuple[str, ...]] = []
    for summary in summaries:
        worst, simulated = summary.worst, predictions.get(summary.setting, {}).get(source)
        if worst is None:
            continue
        low, middle, high = find_quantiles(summary.step_seconds)
        cells = (
            name_row(summary.setting, summary.process),
            f"{1e3 * middle:.1f} ({1e3 * low:.1f} {1e3 * high:.1f})",
            _format_ratio(summary),
            ABSENT if simulated is None else f"{simulated.ratio:.3f}",
            _format_size(summary.peak_bytes),
            _format_size(None if simulated is None else simulated.find_peak(worst)),
            _format_size(worst.peak_reserved_bytes),
            _format_size(worst.host_bytes),
            _format_size(worst.d2h_bytes),
            f"{workload.tokens / middle:.0f}",
        )
        rows.append(cells)
    return rows


def build_times_table(
    summaries: Sequence[Summary], workload: Workload, surroundings: Surroundings, predictions: Predictions
) -> Table:
    """Return the table of step times and memory."""
    table = _start_table(name_run(workload, surroundings))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for cells in list_rows(summaries, workload, predictions):
        table.add_row(*map(Text, cells))
    legend = [_INTERVALS] if has_intervals(summaries) else []
    failed = (f"{name_row(one.setting, one.process)}: {one.failure}" for one in summaries if one.failure)
    table.caption = Text("\n".join((name_versions(surroundings), *legend, *failed)))
    return table


def format_csv(outcomes: Sequence[Outcome], workload: Workload, predictions: Predictions) -> str:
    """Return CSV text with one row for each run, in order, including its predictions."""
    rows = [_make_row(outcomes, outcome, workload, predictions.get(outcome.setting, {})) for outcome in outcomes]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _make_row(
    outcomes: Sequence[Outcome], outcome: Outcome, workload: Workload, predictions: Mapping[Source, Prediction]
) -> dict[str, Any]:
    """Return the values of all columns for a run. Times are rounded to microseconds."""
    measurement, ratio = outcome.measurement or Measurement(step_seconds=()), find_ratio(outcomes, outcome)
    seconds = measurement.step_seconds
    low, middle, high = (round(one, 6) for one in find_quantiles(seconds)) if seconds else (None, None, None)
    row = {
        "setting": outcome.setting.name,
        "process": outcome.process.value,
        "session": outcome.session,
        "repeat": outcome.run.repeat,
        "steps": len(seconds) or None,
        "step_p20_s": low,
        "step_p50_s": middle,
        "step_p80_s": high,
        "over_baseline": None if ratio is None else round(ratio, 6),
        "tokens_per_s": None if middle is None else round(workload.tokens / middle, 1),
        **dataclasses.asdict(measurement),
    }
    del row["step_seconds"]
    for source in Source:
        found = predictions.get(source) if seconds else None
        row |= {
            f"{source.value}_step_s": None if found is None else round(found.step_s, 6),
            f"{source.value}_over_baseline": None if found is None else round(found.ratio, 6),
            f"{source.value}_peak_bytes": None if found is None else found.find_peak(measurement),
        }
    return row | {"failure": outcome.failure}


def format_json(
    outcomes: Sequence[Outcome], workload: Workload, surroundings: Surroundings | None, about: Mapping[str, Any]
) -> str:
    """Return all data of a benchmark as JSON, including the time of each step. `about` contains the date and the command."""
    document = {
        **about,
        "surroundings": None if surroundings is None else dataclasses.asdict(surroundings),
        "workload": dataclasses.asdict(workload),
        "runs": [
            {
                "setting": outcome.setting.name,
                # A budget has no flags before it has a plan.
                "flags": None if outcome.setting.system is System.BUDGET else list(outcome.setting.list_flags()),
                "process": outcome.process.value,
                "session": outcome.session,
                "repeat": outcome.run.repeat,
                "measurement": None if outcome.measurement is None else dataclasses.asdict(outcome.measurement),
                "failure": outcome.failure or None,
            }
            for outcome in outcomes
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def compare_bits(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Compare each outcome with the first `baseline` of its session. The second `baseline` shows whether runs are reproducible.

    Returns:
        A row for each compared outcome: the setting; `yes`, `no` or `not run`; and the first differences or the failure.
    """
    references: dict[int, Outcome] = {}
    rows = []
    for outcome in outcomes:
        reference = references.setdefault(outcome.session, outcome)
        if reference is outcome and not outcome.failure:
            continue
        name = f"{outcome.setting.name}, second run" if outcome.setting == BASELINE else outcome.setting.name
        if failure := outcome.failure or ("" if reference.bits else "the baseline failed"):
            rows.append((name, "not run", failure))
            continue
        differences = find_differences(reference.bits, outcome.bits)
        why = "; ".join(f"{what} from step {one.step}, {one.what}" for what, one in differences.items())
        rows.append((name, "no" if differences else "yes", why))
    return rows


def build_bits_table(rows: Sequence[tuple[str, str, str]], workload: Workload, surroundings: Surroundings) -> Table:
    """Return the table of a bitwise comparison."""
    table = _start_table(f"{name_run(workload, surroundings)}: losses and gradients, bitwise")
    table.caption = Text(name_versions(surroundings))
    for heading in ("setting", "identical to baseline", "first difference"):
        table.add_column(heading)
    styles = {"yes": "green", "no": "bold red", "not run": "yellow"}
    for name, answer, why in rows:
        table.add_row(Text(name), Text(answer, style=styles[answer]), Text(why))
    return table


def has_intervals(summaries: Iterable[Summary]) -> bool:
    """Return whether a table of `summaries` shows confidence intervals."""
    return any(one.setting != BASELINE and find_ratio_interval(one.ratios) is not None for one in summaries)


def name_row(setting: Setting, process: ProcessKind) -> str:
    """Return the name of a setting's row, with the kind of process for a `baseline` outside the main process."""
    return f"{setting.name} ({process.value})" if setting == BASELINE and process is not ProcessKind.MAIN else setting.name


def name_run(workload: Workload, surroundings: Surroundings) -> str:
    """Return one line with the model and the machine."""
    device = surroundings.device if workload.world_size == 1 else f"{workload.world_size} x {surroundings.device}"
    layers = "1 layer" if workload.layers == 1 else f"{workload.layers} layers"
    return f"{workload.arguments_file}: {layers} on {device}"


def name_versions(surroundings: Surroundings) -> str:
    """Return one line with the versions of the packages and the driver."""
    driver = f", driver {surroundings.driver}" if surroundings.driver else ""
    return ", ".join(f"{name} {version}" for name, version in surroundings.packages.items()) + driver


def _start_table(title: str) -> Table:
    # Rich would parse a plain string as markup, and names and errors can contain brackets.
    return Table(title=Text(title), title_justify="left", caption_justify="left")


def _format_size(size_bytes: int | None) -> str:
    return ABSENT if size_bytes is None else format_bytes(size_bytes)


def _format_ratio(summary: Summary) -> str:
    if summary.ratio is None:
        return ABSENT
    interval = None if summary.setting == BASELINE else find_ratio_interval(summary.ratios)
    return f"{summary.ratio:.3f}" if interval is None else f"{summary.ratio:.3f} [{interval[0]:.3f} {interval[1]:.3f}]"
