"""Formats the results of a benchmark: tables for the terminal, CSV and JSON."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.measurement import Measurement, Outcome, Summary, find_quantiles, find_ratio
from fgoffload.benchmark.prediction import Prediction, Predictions, Source, choose_source
from fgoffload.benchmark.settings import BASELINE, ProcessKind, Setting, System
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.trainer.steps import find_differences
from fgoffload.units import format_bytes

ABSENT = "-"
"""Cell of an unknown or inapplicable value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Description of the training, for titles and rates."""

    arguments_file: str
    """Path of the argument file, as the user typed it."""
    layers: int
    """Number of decoder layers."""
    tokens: int
    """Tokens of a step, over all ranks."""
    world_size: int
    """Number of processes of the training."""


HEADINGS = (
    "setting",
    "step ms (p20 p80)",
    "over baseline",
    "simulated",
    "peak",
    "simulated peak",
    "reserved",
    "host",
    "to host a step",
    "tokens/s",
)
"""Headings of the table of times."""

INTERVALS = (
    "Over baseline: the geometric mean of the repeats with its 95% interval; with fewer than three repeats, each of them."
)
"""Caption of a table with intervals."""


def list_rows(summaries: Sequence[Summary], workload: Workload, predictions: Predictions) -> list[tuple[str, ...]]:
    """Return the cells of each setting under `HEADINGS`. The second cell of a failed setting has the reason."""
    source = choose_source(predictions)
    return [_list_cells(summary, workload, predictions.get(summary.setting, {}).get(source)) for summary in summaries]


def build_times_table(
    summaries: Sequence[Summary], workload: Workload, surroundings: Surroundings, predictions: Predictions
) -> Table:
    """Return the table of step times and memory."""
    table = _start_table(name_run(workload, surroundings))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for summary, cells in zip(summaries, list_rows(summaries, workload, predictions), strict=True):
        if summary.worst is not None:
            table.add_row(*map(Text, cells))
    legend = [INTERVALS] if has_intervals(summaries) else []
    failed = (f"{name_row(one.setting, one.process)}: {one.failure}" for one in summaries if one.failure)
    table.caption = Text("\n".join((name_versions(surroundings), *legend, *failed)))
    return table


def format_csv(outcomes: Sequence[Outcome], workload: Workload, predictions: Predictions) -> str:
    """Return CSV text with one row for each run, in order, and its prediction."""
    text = io.StringIO()
    measured = (field.name for field in dataclasses.fields(Measurement) if field.name != "step_seconds")
    predicted = (f"{source.value}_{name}" for source in Source for name in ("step_s", "over_baseline", "peak_bytes"))
    writer = csv.DictWriter(text, [*_COLUMNS, *measured, *predicted, "failure"], lineterminator="\n")
    writer.writeheader()
    for outcome in outcomes:
        row: dict[str, Any] = {
            "setting": outcome.setting.name,
            "process": outcome.process.value,
            "session": outcome.session,
            "repeat": outcome.run.repeat,
            "over_baseline": _round(find_ratio(outcomes, outcome)),
            "failure": outcome.failure,
        }
        if outcome.measurement is not None:
            row |= _list_numbers(outcome.measurement, workload)
            for source, prediction in predictions.get(outcome.setting, {}).items():
                row |= _list_predictions(outcome.measurement, source, prediction)
        writer.writerow(row)
    return text.getvalue()


def format_json(
    outcomes: Sequence[Outcome], workload: Workload, surroundings: Surroundings | None, about: Mapping[str, Any]
) -> str:
    """Return all data of a benchmark as JSON, including the time of each step.

    Args:
        outcomes: Outcomes in the order of their runs.
        workload: Description of the training.
        surroundings: Machine and versions; None until a process reports them.
        about: Date, command and other metadata.
    """
    document = {
        **about,
        "surroundings": None if surroundings is None else dataclasses.asdict(surroundings),
        "workload": dataclasses.asdict(workload),
        "runs": [
            {
                "setting": outcome.setting.name,
                # The flags of a budget are in its plan.
                "flags": None if outcome.setting.system is System.BUDGET else list(outcome.setting.list_flags()),
                "process": outcome.process.value,
                "session": outcome.session,
                "repeat": outcome.run.repeat,
                "measurement": None if outcome.measurement is None else dataclasses.asdict(outcome.measurement),
                # Written after each setting, so that an interrupted benchmark has compared the earlier ones.
                "bits": [step.digest for step in outcome.bits],
                "failure": outcome.failure or None,
            }
            for outcome in outcomes
        ],
    }
    return json.dumps(document, indent=1) + "\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitsRow:
    """Result of the bitwise comparison of one run with `baseline`."""

    outcome: Outcome
    differences: tuple[str, ...] = ()
    """First differences of losses and gradients; empty if all are bitwise identical."""
    failure: str = ""
    """Reason why the setting could not be compared."""

    @property
    def is_equal(self) -> bool:
        """Whether all losses and all gradients of all steps are bitwise identical."""
        return not self.differences and not self.failure


def compare_bits(outcomes: Sequence[Outcome]) -> list[BitsRow]:
    """Compare each later outcome with the first `baseline` of its process, and return a row for each.

    A second `baseline` shows whether the training reproduces itself. If it does not, the other rows are meaningless.
    """
    references: dict[int, Outcome] = {}
    rows = []
    for outcome in outcomes:
        reference = references.get(outcome.session)
        if reference is None and outcome.setting == BASELINE:
            references[outcome.session] = outcome
            if not outcome.failure:
                continue
        failure = outcome.failure or ("" if reference is not None and reference.bits else "no baseline to compare with")
        found = {} if failure or reference is None else find_differences(reference.bits, outcome.bits)
        differences = tuple(f"{what} from step {one.step}, {one.what}" for what, one in found.items())
        rows.append(BitsRow(outcome=outcome, differences=differences, failure=failure))
    return rows


def build_bits_table(rows: Sequence[BitsRow], workload: Workload, surroundings: Surroundings) -> Table:
    """Return the table of a bitwise comparison."""
    table = _start_table(f"{name_run(workload, surroundings)}: losses and gradients, bitwise")
    table.caption = Text(name_versions(surroundings))
    for heading in ("setting", "identical to baseline", "first difference"):
        table.add_column(heading)
    for row in rows:
        setting = row.outcome.setting
        answer = Text("yes", style="green") if row.is_equal else Text("no", style="bold red")
        if row.failure:
            answer = Text("not run", style="yellow")
        name = f"{setting.name}, again" if setting == BASELINE else setting.name
        table.add_row(Text(name), answer, Text(row.failure or "; ".join(row.differences)))
    return table


def has_intervals(summaries: Iterable[Summary]) -> bool:
    """Return whether a table of `summaries` shows an interval, and so needs the caption."""
    return any(one.setting != BASELINE and one.find_interval() is not None for one in summaries)


def name_row(setting: Setting, process: ProcessKind) -> str:
    """Return the name of a setting's row. The name of `baseline` includes the kind of process, since each kind has one."""
    return f"{setting.name} ({process.value})" if setting == BASELINE and process is not ProcessKind.MAIN else setting.name


def name_run(workload: Workload, surroundings: Surroundings) -> str:
    """Return one line with the model and the machine."""
    device = surroundings.device if workload.world_size == 1 else f"{workload.world_size} x {surroundings.device}"
    layers = "1 layer" if workload.layers == 1 else f"{workload.layers} layers"
    return f"{workload.arguments_file}: {layers} on {device}"


def name_versions(surroundings: Surroundings) -> str:
    """Return one line with the versions that the run depends on."""
    driver = f", driver {surroundings.driver}" if surroundings.driver else ""
    return ", ".join(f"{name} {version}" for name, version in surroundings.packages.items()) + driver


_COLUMNS = (
    "setting",
    "process",
    "session",
    "repeat",
    "steps",
    "step_p20_s",
    "step_p50_s",
    "step_p80_s",
    "over_baseline",
    "tokens_per_s",
)


def _start_table(title: str) -> Table:
    # Use Text, since brackets in names and errors are not markup.
    return Table(title=Text(title), title_justify="left", caption_justify="left")


def _list_cells(summary: Summary, workload: Workload, simulated: Prediction | None) -> tuple[str, ...]:
    name = name_row(summary.setting, summary.process)
    worst = summary.worst
    if worst is None:
        return name, f"not measured: {summary.failure}", *(ABSENT for _ in HEADINGS[2:])
    low, middle, high = find_quantiles(summary.step_seconds)
    return (
        name,
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


def _format_size(size_bytes: int | None) -> str:
    return ABSENT if size_bytes is None else format_bytes(size_bytes)


def _format_ratio(summary: Summary) -> str:
    if summary.ratio is None:
        return ABSENT
    if summary.setting == BASELINE:
        return f"{summary.ratio:.3f}"
    interval = summary.find_interval()
    if interval is not None:
        return f"{summary.ratio:.3f} [{interval[0]:.3f} {interval[1]:.3f}]"
    # With two repeats, show both: drift of the machine makes them differ.
    return " ".join(f"{ratio:.3f}" for ratio in summary.ratios)


def _list_numbers(measurement: Measurement, workload: Workload) -> dict[str, Any]:
    low, middle, high = find_quantiles(measurement.step_seconds)
    numbers = dataclasses.asdict(measurement)
    del numbers["step_seconds"]
    return numbers | {
        "steps": len(measurement.step_seconds),
        "step_p20_s": _round(low),
        "step_p50_s": _round(middle),
        "step_p80_s": _round(high),
        "tokens_per_s": round(workload.tokens / middle, 1),
    }


def _list_predictions(measurement: Measurement, source: Source, prediction: Prediction) -> dict[str, Any]:
    return {
        f"{source.value}_step_s": _round(prediction.step_s),
        f"{source.value}_over_baseline": _round(prediction.ratio),
        f"{source.value}_peak_bytes": prediction.find_peak(measurement),
    }


def _round(value: float | None) -> float | None:
    # Repeats do not agree to a microsecond of a step or a hundredth of a percent of a ratio.
    return None if value is None else round(value, 6)
