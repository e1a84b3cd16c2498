"""Shows what a benchmark measured: tables for the terminal and for a page, CSV and JSON."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.measurement import Measurement, Outcome, Summary, find_quantiles, find_ratio
from fgoffload.benchmark.prediction import COLUMNS, Prediction, Predictions, choose_source, list_numbers
from fgoffload.benchmark.settings import BASELINE, PROFILE, ProcessKind, Setting, System
from fgoffload.benchmark.steps import Difference, find_gradient_difference, find_loss_difference
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.units import format_bytes

ABSENT = "-"
"""Cell of an unknown or inapplicable value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The training, for titles and rates."""

    arguments_file: str
    """As the user named it."""
    layers: int
    """Of the decoder."""
    dtype: str
    """Of its parameters, as in `bfloat16`."""
    tokens: int
    """Of a step, all ranks together."""
    model_flop: int
    """Of a step, all ranks together: see `model_flop`."""
    world_size: int
    """Processes of the training."""
    device_flop_per_s: float | None = None
    """Dense, in bf16, of one device; None where the table does not have it, or the model is in another type."""

    def find_utilization(self, seconds: float) -> float | None:
        """Return the part of the devices' rate that the model's own operations come to, or None."""
        if self.device_flop_per_s is None:
            return None
        return self.model_flop / seconds / (self.device_flop_per_s * self.world_size)


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
    "MFU",
)
"""Of the table of times."""

INTERVALS = (
    "Over baseline: the geometric mean of the repeats with its 95% interval; with fewer than three repeats, each of them."
)
"""Said below a table that has intervals."""


def list_rows(summaries: Sequence[Summary], workload: Workload, predictions: Predictions) -> list[tuple[str, ...]]:
    """Return the cells of each setting, under `HEADINGS`; one that failed has its reason in the second cell."""
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
    failed = (line for summary in summaries if (line := _describe_failure(summary)))
    table.caption = Text("\n".join((name_versions(surroundings), *legend, *failed)))
    return table


def format_csv(
    outcomes: Sequence[Outcome], processes: Sequence[ProcessKind], workload: Workload, predictions: Predictions
) -> str:
    """Return one row for each setting and repeat, in the order in which they ran, with what was predicted of it."""
    text = io.StringIO()
    measured = (field.name for field in dataclasses.fields(Measurement) if field.name != "step_seconds")
    writer = csv.DictWriter(text, [*_COLUMNS, *measured, *COLUMNS, "failure"], lineterminator="\n")
    writer.writeheader()
    for index, outcome in enumerate(outcomes):
        row: dict[str, Any] = {
            "setting": outcome.setting.name,
            "process": processes[outcome.session].value,
            "session": outcome.session,
            "repeat": outcome.repeat,
            "over_baseline": _round(find_ratio(outcomes, index)),
            "failure": outcome.failure,
        }
        if outcome.measurement is not None:
            row |= _list_numbers(outcome.measurement)
            if outcome.setting != PROFILE:  # whose one step is slowed by what measures it
                row |= _list_rates(outcome.measurement, workload)
            row |= list_numbers(outcome.measurement, predictions.get(outcome.setting, {}))
        writer.writerow(row)
    return text.getvalue()


def format_json(
    outcomes: Sequence[Outcome],
    processes: Sequence[ProcessKind],
    workload: Workload,
    surroundings: Surroundings | None,
    about: Mapping[str, Any],
) -> str:
    """Return everything that is known of a benchmark, the time of each step included.

    Args:
        outcomes: In the order in which they ran.
        processes: By session.
        workload: What was trained.
        surroundings: What it ran on; None before a process has said so.
        about: Date, command and whatever else.
    """
    document = {
        **about,
        "surroundings": None if surroundings is None else dataclasses.asdict(surroundings),
        "workload": dataclasses.asdict(workload),
        "runs": [
            {
                "setting": outcome.setting.name,
                "flags": _list_flags(outcome.setting),
                "process": processes[outcome.session].value,
                "session": outcome.session,
                "repeat": outcome.repeat,
                "measurement": None if outcome.measurement is None else dataclasses.asdict(outcome.measurement),
                # As soon as a setting has run: a benchmark that is cut off has compared the ones before.
                "bits": [step.digest for step in outcome.bits],
                "failure": outcome.failure or None,
            }
            for outcome in outcomes
        ],
    }
    return json.dumps(document, indent=1) + "\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitsRow:
    """Whether one setting computed what `baseline` did."""

    setting: Setting
    session: int
    """The process that it ran in."""
    differences: tuple[str, ...] = ()
    """Where losses and gradients first differ; empty where all are equal."""
    failure: str = ""
    """Why there was nothing to compare."""

    @property
    def is_equal(self) -> bool:
        """Whether all losses and all gradients of all steps are bitwise identical."""
        return not self.differences and not self.failure


_BITS = "losses and gradients, bitwise"
_BITS_HEADINGS = ("setting", "identical to baseline", "first difference")


def compare_bits(outcomes: Sequence[Outcome]) -> list[BitsRow]:
    """Return a row for each outcome but the first `baseline` of each process, with which the others are compared.

    A second `baseline` shows whether the training reproduces itself: where it does not, the others say nothing.
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
        differences = () if failure or reference is None else tuple(_describe_differences(reference, outcome))
        rows.append(BitsRow(setting=outcome.setting, session=outcome.session, differences=differences, failure=failure))
    return rows


def build_bits_table(rows: Sequence[BitsRow], workload: Workload, surroundings: Surroundings) -> Table:
    """Return the table of a comparison of bits."""
    table = _start_table(f"{name_run(workload, surroundings)}: {_BITS}")
    table.caption = Text(name_versions(surroundings))
    for heading in _BITS_HEADINGS:
        table.add_column(heading)
    styles = {"yes": "green", "no": "bold red"}
    for name, answer, why in map(_list_bits, rows):
        table.add_row(Text(name), Text(answer, style=styles.get(answer, "yellow")), Text(why))
    return table


def _list_bits(row: BitsRow) -> tuple[str, str, str]:
    name = f"{row.setting.name}, again" if row.setting == BASELINE else row.setting.name
    if row.failure:
        return name, "not run", row.failure
    return name, "yes" if row.is_equal else "no", "; ".join(row.differences)


def has_intervals(summaries: Iterable[Summary]) -> bool:
    """Return whether a table of `summaries` shows an interval, and needs to say of what."""
    return any(one.setting != BASELINE and one.find_interval() is not None for one in summaries)


def note_missed(summary: Summary) -> str:
    """Return in how many repeats a setting was measured that was not in all, to stand behind its name or number."""
    if summary.worst is None or not summary.missed_repeats:
        return ""
    return f", {summary.repeats - summary.missed_repeats} of {summary.repeats} repeats"


def name_row(setting: Setting, process: ProcessKind) -> str:
    """Return what the row of a setting is called: `baseline` says its kind of process, since each has one."""
    return f"{setting.name} ({process.value})" if setting == BASELINE and process is not ProcessKind.MAIN else setting.name


def name_run(workload: Workload, surroundings: Surroundings) -> str:
    """Return one line: the model and where it ran."""
    device = surroundings.device if workload.world_size == 1 else f"{workload.world_size} x {surroundings.device}"
    layers = "1 layer" if workload.layers == 1 else f"{workload.layers} layers"
    return f"{workload.arguments_file}: {layers} on {device}"


def name_versions(surroundings: Surroundings) -> str:
    """Return one line: what the run depends on."""
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
    "model_flop_utilization",
)


def _start_table(title: str) -> Table:
    # As Text: names and errors may hold brackets, which mean styles in plain strings.
    return Table(title=Text(title), title_justify="left", caption_justify="left")


def _list_cells(summary: Summary, workload: Workload, simulated: Prediction | None) -> tuple[str, ...]:
    name = name_row(summary.setting, summary.process)
    worst, seconds = summary.worst, summary.seconds
    if worst is None or seconds is None:
        return name, f"not measured: {summary.failure}", *(ABSENT for _ in HEADINGS[2:])
    low, middle, high = (f"{1e3 * one:.1f}" for one in find_quantiles(summary.step_seconds))
    utilization = workload.find_utilization(seconds)
    return (
        name,
        f"{middle} ({low} {high}){note_missed(summary)}",
        _format_ratio(summary),
        ABSENT if simulated is None else f"{simulated.ratio:.3f}",
        *(
            ABSENT if size_bytes is None else format_bytes(size_bytes)
            for size_bytes in (
                summary.peak_bytes,
                None if simulated is None else simulated.find_peak(worst),
                worst.peak_reserved_bytes,
                worst.host_bytes,
                worst.d2h_bytes,
            )
        ),
        f"{workload.tokens / seconds:.0f}",
        ABSENT if utilization is None else f"{utilization:.1%}",
    )


def _describe_failure(summary: Summary) -> str:
    """Return one line: what failed, in how many repeats it was measured all the same, and why; nothing where nothing failed."""
    if not summary.failure:
        return ""
    name = name_row(summary.setting, summary.process)
    if summary.worst is None:
        return f"{name}: {summary.failure}"
    # `baseline` may run several times in a repeat.
    where = note_missed(summary).removeprefix(", ") or "all repeats, where another run of it failed"
    return f"{name}: measured in {where}: {summary.failure}"


def _format_ratio(summary: Summary) -> str:
    if summary.ratio is None:
        return ABSENT
    if summary.setting == BASELINE:
        return f"{summary.ratio:.3f}"
    interval = summary.find_interval()
    if interval is not None:
        return f"{summary.ratio:.3f} [{interval[0]:.3f} {interval[1]:.3f}]"
    # Of two repeats each is shown: a machine that drifts makes them differ.
    return " ".join(f"{ratio:.3f}" for ratio in summary.ratios)


def _list_flags(setting: Setting) -> list[str] | None:
    # Those of a budget are in the plan that was made for it, and a profile is no setting.
    return None if setting.system in (System.BUDGET, System.PROFILE) else list(setting.list_flags())


def _list_numbers(measurement: Measurement) -> dict[str, Any]:
    low, middle, high = find_quantiles(measurement.step_seconds)
    numbers = {field.name: getattr(measurement, field.name) for field in dataclasses.fields(measurement)}
    del numbers["step_seconds"]
    return numbers | {
        "steps": len(measurement.step_seconds),
        "step_p20_s": _round(low),
        "step_p50_s": _round(middle),
        "step_p80_s": _round(high),
    }


def _list_rates(measurement: Measurement, workload: Workload) -> dict[str, Any]:
    return {
        "tokens_per_s": round(workload.tokens / measurement.seconds, 1),
        "model_flop_utilization": _round(workload.find_utilization(measurement.seconds)),
    }


def _round(value: float | None) -> float | None:
    # A microsecond of a step, and a hundredth of a percent of a ratio, is below anything that repeats.
    return None if value is None else round(value, 6)


def _describe_differences(reference: Outcome, outcome: Outcome) -> Iterable[str]:
    found: tuple[tuple[str, Difference | None], ...] = (
        ("losses", find_loss_difference(reference.bits, outcome.bits)),
        ("gradients", find_gradient_difference(reference.bits, outcome.bits)),
    )
    for what, difference in found:
        if difference is not None:
            yield f"{what} from step {difference.step}, {difference.what}"
