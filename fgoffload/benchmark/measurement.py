"""Measured step times and memory of settings, and their comparison."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fgoffload.benchmark.settings import BASELINE, PROFILE, ProcessKind, Setting
from fgoffload.benchmark.steps import StepRecord

CONFIDENCE = 0.95
"""Confidence level of a ratio's interval."""

FEWEST_REPEATS = 3
"""Fewest repeats for an interval. With two repeats, the interval would be ten times their distance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Step times and memory of one setting. Times and device memory are maxima over ranks; the rest are sums."""

    step_seconds: tuple[float, ...]
    """Seconds of the timed steps, in order."""
    peak_allocated_bytes: int | None = None
    """Peak bytes of tensors during the timed steps; None if the device's allocator does not count them."""
    peak_reserved_bytes: int | None = None
    """Peak bytes that the allocator reserved during the timed steps."""
    resident_bytes: int | None = None
    """Bytes of tensors between steps: weights and gradients."""
    activation_peak_bytes: int | None = None
    """Peak bytes held by autograd, from a separate step. Only measured if no allocator counts bytes."""
    host_bytes: int | None = None
    """Pinned host bytes, including cached ones; None if they are not counted."""
    d2h_bytes: int | None = None
    """Bytes that our engine offloads in a step; None for other engines."""
    prefetch_misses: int | None = None
    """Number of storages per step whose reload our engine started only when backward requested them."""
    window_waits: int | None = None
    """Number of times per step that compute waited for copies to the host, with our engine."""

    @property
    def seconds(self) -> float:
        """The median step time."""
        return statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits: the allocator's, or the activation peak if no allocator counts bytes."""
        return self.activation_peak_bytes if self.peak_allocated_bytes is None else self.peak_allocated_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run of one setting."""

    setting: Setting
    repeat: int
    """Number of the repeat of the whole list, from 0."""
    session: int
    """Number of the run's session, from 0 over the whole benchmark. Times are only compared within a session."""
    measurement: Measurement | None = None
    """Measured times and memory; None if the run failed or bits are compared."""
    bits: tuple[StepRecord, ...] = ()
    """Results of each step, if bits are compared."""
    failure: str = ""
    """Reason for a failure, in one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of one setting over all repeats."""

    setting: Setting
    process: ProcessKind
    """Kind of process of the runs. `baseline` runs in each kind."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of all timed steps of all repeats; empty if all failed."""
    ratios: tuple[float, ...] = ()
    """Median step time of each repeat, relative to the baseline's; see `find_reference_s`."""
    worst: Measurement | None = None
    """Maximum of each number over all repeats, except `step_seconds`, which are those of the first one."""
    failure: str = ""
    """Reason for the last failure."""
    repeats: int = 1
    """Number of repeats of the whole list."""
    missed_repeats: int = 0
    """Number of repeats without a measurement of this setting. All results come from the other repeats."""

    @property
    def ratio(self) -> float | None:
        """The step time relative to the baseline, over all repeats, or None.

        With `FEWEST_REPEATS` or more it is the geometric mean, which is the middle of the interval; with fewer, the median.
        """
        if len(self.ratios) >= FEWEST_REPEATS:
            return statistics.geometric_mean(self.ratios)
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def seconds(self) -> float | None:
        """The median step time over all repeats, or None without a measurement."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits."""
        return None if self.worst is None else self.worst.peak_bytes

    def find_interval(self) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the ratios' geometric mean, or None below `FEWEST_REPEATS` repeats.

        Repeats are paired: each has its own `baseline`, so drift of the machine affects both.
        """
        return find_ratio_interval(self.ratios)


def find_ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the ratios' geometric mean, or None with fewer than `FEWEST_REPEATS` ratios.

    Ratios multiply, so this is Student's t-interval of their logarithms. Its middle is the geometric mean, not a median.
    """
    if len(ratios) < FEWEST_REPEATS:
        return None
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
    return math.exp(mean - reach), math.exp(mean + reach)


def find_quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, p50 and p80, interpolated between the two nearest values."""
    ordered = sorted(seconds)
    return _find_quantile(ordered, 0.2), statistics.median(ordered), _find_quantile(ordered, 0.8)


def merge_ranks(measurements: Sequence[Measurement]) -> Measurement:
    """Merge the measurements of all ranks for the same steps."""
    return Measurement(
        step_seconds=tuple(map(max, zip(*(one.step_seconds for one in measurements), strict=True))),
        **{name: _combine(max, (getattr(one, name) for one in measurements)) for name in _MOST},
        **{name: _combine(sum, (getattr(one, name) for one in measurements)) for name in _SUM},
    )


def find_reference_s(outcomes: Sequence[Outcome], index: int) -> float | None:
    """Return the baseline step time for the outcome at `index`, or None if there is none.

    The baseline time is the median of all `baseline` steps in the same process and repeat. Each newly built `baseline` is
    faster or slower as a whole, so the runs right before and after a setting are no better references than the others.
    `baseline` itself is compared with its own steps.
    """
    own = outcomes[index]
    if own.setting == BASELINE:
        return None if own.measurement is None else own.measurement.seconds
    return find_baseline_s(one for one in outcomes if (one.session, one.repeat) == (own.session, own.repeat))


def find_baseline_s(outcomes: Iterable[Outcome]) -> float | None:
    """Return the median of all steps of `baseline` among `outcomes`, or None if there are none."""
    measured = (one.measurement for one in outcomes if one.setting == BASELINE and one.measurement is not None)
    seconds = [step for measurement in measured for step in measurement.step_seconds]
    return statistics.median(seconds) if seconds else None


def find_ratio(outcomes: Sequence[Outcome], index: int) -> float | None:
    """Return the step time of the outcome at `index` relative to the baseline's, or None if either is missing.

    A profile has no ratio. Measuring slows its only step, and it is not a setting to compare.
    """
    if outcomes[index].setting == PROFILE:
        return None
    measurement, reference_s = outcomes[index].measurement, find_reference_s(outcomes, index)
    return None if measurement is None or reference_s is None else measurement.seconds / reference_s


def summarize(
    outcomes: Sequence[Outcome], processes: Sequence[ProcessKind], *, repeats: int | None = None
) -> tuple[Summary, ...]:
    """Return one summary for each setting and kind of process, in the order of their first runs.

    A measured profile is not a setting and has no summary. A failed profile has one, with the reason.

    Args:
        outcomes: Outcomes in the order of their runs.
        processes: Kind of process of each session.
        repeats: Number of repeats of the whole list; None counts those with a run. A crashed setting does not run again.
    """
    if repeats is None:
        repeats = 1 + max((outcome.repeat for outcome in outcomes), default=0)
    found: dict[tuple[ProcessKind, Setting], list[int]] = {}
    for index, outcome in enumerate(outcomes):
        if outcome.setting == PROFILE and outcome.measurement is not None:
            continue
        found.setdefault((processes[outcome.session], outcome.setting), []).append(index)
    return tuple(_summarize(outcomes, indices, process, repeats) for (process, _), indices in found.items())


def _summarize(outcomes: Sequence[Outcome], indices: Sequence[int], process: ProcessKind, repeats: int) -> Summary:
    own = [outcomes[index] for index in indices]
    measured = [outcome.measurement for outcome in own if outcome.measurement is not None]
    ratios = (find_ratio(outcomes, index) for index in indices)
    return Summary(
        setting=own[0].setting,
        process=process,
        step_seconds=tuple(seconds for one in measured for seconds in one.step_seconds),
        ratios=tuple(ratio for ratio in ratios if ratio is not None),
        worst=_find_worst(measured) if measured else None,
        failure=next((outcome.failure for outcome in reversed(own) if outcome.failure), ""),
        repeats=repeats,
        missed_repeats=repeats - len({outcome.repeat for outcome in own if outcome.measurement is not None}),
    )


def _find_worst(measurements: Sequence[Measurement]) -> Measurement:
    worst = {name: _combine(max, (getattr(one, name) for one in measurements)) for name in (*_MOST, *_SUM)}
    return Measurement(step_seconds=measurements[0].step_seconds, **worst)


_MOST = ("peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes", "activation_peak_bytes")
_SUM = ("host_bytes", "d2h_bytes", "prefetch_misses", "window_waits")
"""Fields of a measurement that are merged over ranks by their maximum, and by their sum."""


def _combine(function: Callable[[list[Any]], Any], values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _find_quantile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
