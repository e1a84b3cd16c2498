"""Merges the measured step times and memory peaks of settings, and compares settings with the baseline."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fgoffload.benchmark.settings import BASELINE, ProcessKind, Setting
from fgoffload.trainer.steps import StepResult

MIN_REPEATS = 3
"""Minimum number of repeats for a confidence interval. With two, its width is over ten times the ratios' difference."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of one setting."""

    setting: Setting
    repeat: int
    """Index of the repeat. Each repeat runs the whole list of settings."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Step times and memory of one setting. Times and device memory are maxima over ranks; the rest are sums."""

    step_seconds: tuple[float, ...]
    peak_allocated_bytes: int | None = None
    """Peak bytes of tensors during the timed steps; None on a CPU."""
    peak_reserved_bytes: int | None = None
    activation_peak_bytes: int | None = None
    """Peak bytes saved for backward, from a separate step. Measured only on a CPU."""
    host_bytes: int | None = None
    """Pinned host bytes, including cached ones; None if the device is a CPU and the setting does not use fgoffload."""
    d2h_bytes: int | None = None
    """Bytes per step that our engine offloads; None for other engines."""
    prefetch_misses: int | None = None
    """Number of storages per step that were not reloaded before backward reached their group."""
    window_waits: int | None = None
    """Number of times per step that compute waited for copies to the host."""

    @property
    def seconds(self) -> float:
        """The median step time."""
        return statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits: allocated memory, or activations on a CPU."""
        return self.activation_peak_bytes if self.peak_allocated_bytes is None else self.peak_allocated_bytes


_SUMS = ("host_bytes", "d2h_bytes", "prefetch_misses", "window_waits")
"""Fields of a measurement that are summed over ranks. For all other fields, the maximum over ranks is used."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run of one setting."""

    run: Run
    process: ProcessKind
    """Kind of process that ran the setting. `baseline` runs in each kind of process."""
    session: int
    """Index of the run's session in the whole benchmark. Times are compared only within a session."""
    measurement: Measurement | None = None
    """Measured times and memory; None in a bitwise comparison or if the run failed."""
    bits: tuple[StepResult, ...] = ()
    """Results of each step in a bitwise comparison."""
    failure: str = ""
    """Reason for a failure, on one line."""

    @property
    def setting(self) -> Setting:
        """The setting of the run."""
        return self.run.setting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of one setting over all repeats."""

    setting: Setting
    process: ProcessKind
    step_seconds: tuple[float, ...] = ()
    """Seconds of each timed step in all repeats; empty if every repeat failed."""
    ratios: tuple[float, ...] = ()
    """Median step time of each repeat, relative to the baseline; see `find_ratio`."""
    worst: Measurement | None = None
    """Maximum of each figure over all repeats. `step_seconds` are from the first repeat that succeeded."""
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """The geometric mean of `ratios`, or None if `ratios` is empty."""
        return statistics.geometric_mean(self.ratios) if self.ratios else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits."""
        return None if self.worst is None else self.worst.peak_bytes


def find_ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the ratios' geometric mean, or None with fewer than `MIN_REPEATS` ratios.

    This is Student's t-interval for the mean log ratio. Each repeat has its own `baseline`, so most drift in speed cancels out.
    """
    if len(ratios) < MIN_REPEATS:
        return None
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    margin = error * float(stats.t.ppf(0.975, len(logs) - 1))
    return math.exp(mean - margin), math.exp(mean + margin)


def find_quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, p50 and p80, with linear interpolation."""
    import numpy

    low, middle, high = numpy.quantile(seconds, (0.2, 0.5, 0.8))
    return float(low), float(middle), float(high)


def merge_ranks(measurements: Sequence[Measurement]) -> Measurement:
    """Merge the measurements that all ranks took of the same steps."""
    slowest = tuple(map(max, zip(*(one.step_seconds for one in measurements), strict=True)))
    return _merge(measurements, step_seconds=slowest, sums=_SUMS)


def find_ratio(outcomes: Sequence[Outcome], outcome: Outcome) -> float | None:
    """Return the step time of `outcome` relative to the baseline, or None if either time is missing.

    The baseline time is the median of all `baseline` steps in the same session and repeat. Two builds of the `baseline` model
    differ slightly in speed, so the `baseline` runs adjacent to a setting are no better references than the others.
    """
    if outcome.measurement is None:
        return None
    if outcome.setting == BASELINE:
        return 1.0
    comparable = (one for one in outcomes if (one.session, one.run.repeat) == (outcome.session, outcome.run.repeat))
    measured = (one.measurement for one in comparable if one.setting == BASELINE and one.measurement is not None)
    seconds = [step for measurement in measured for step in measurement.step_seconds]
    return outcome.measurement.seconds / statistics.median(seconds) if seconds else None


def summarize(outcomes: Sequence[Outcome]) -> tuple[Summary, ...]:
    """Return one summary for each setting and kind of process, in the order of their first runs."""
    found: dict[tuple[ProcessKind, Setting], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.process, outcome.setting), []).append(outcome)
    summaries = []
    for (process, setting), own in found.items():
        measured = [outcome.measurement for outcome in own if outcome.measurement is not None]
        ratios = (find_ratio(outcomes, outcome) for outcome in own)
        summary = Summary(
            setting=setting,
            process=process,
            step_seconds=tuple(seconds for one in measured for seconds in one.step_seconds),
            ratios=tuple(ratio for ratio in ratios if ratio is not None),
            worst=_merge(measured, step_seconds=measured[0].step_seconds) if measured else None,
            failure=next((outcome.failure for outcome in reversed(own) if outcome.failure), ""),
        )
        summaries.append(summary)
    return tuple(summaries)


def _merge(measurements: Sequence[Measurement], *, step_seconds: tuple[float, ...], sums: Sequence[str] = ()) -> Measurement:
    """Return the maximum of each field, or the sum for fields in `sums`."""
    merged: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Measurement) if field.name != "step_seconds"):
        combine: Callable[[Iterable[int]], int] = sum if name in sums else max
        known = [value for one in measurements if (value := getattr(one, name)) is not None]
        merged[name] = combine(known) if known else None
    return Measurement(step_seconds=step_seconds, **merged)
