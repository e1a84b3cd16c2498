"""Measurements of settings, and their comparison."""

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
"""An interval from two repeats would be ten times their distance: no number to show."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of one setting: the maximum over ranks for time and device memory, the sum for the rest."""

    step_seconds: tuple[float, ...]
    """Seconds of the timed steps, in order."""
    peak_allocated_bytes: int | None = None
    """The most that tensors took during the timed steps; None on a device whose allocator does not count."""
    peak_reserved_bytes: int | None = None
    """The most that the allocator held for them."""
    resident_bytes: int | None = None
    """Bytes of tensors between steps: weights and gradients."""
    activation_peak_bytes: int | None = None
    """The most that autograd kept, in a step of its own: measured where no allocator counts."""
    host_bytes: int | None = None
    """Page-locked host memory, what is held for later included; None where nothing counts it."""
    d2h_bytes: int | None = None
    """Bytes that our engine offloads in a step; None for other engines."""
    prefetch_misses: int | None = None
    """Storages of a step that our engine reloaded only when backward asked for them."""
    window_waits: int | None = None
    """How often compute waited for copies to the host in a step, with our engine."""

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits: the allocator's, or that of activations without one."""
        return self.activation_peak_bytes if self.peak_allocated_bytes is None else self.peak_allocated_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One setting, measured once."""

    setting: Setting
    repeat: int
    """Of the whole list, from 0."""
    session: int
    """The process that it ran in, from 0, over all of a benchmark. Only within one are times compared."""
    measurement: Measurement | None = None
    """None where it failed, or where bits are compared."""
    bits: tuple[StepRecord, ...] = ()
    """Results of each step, if bits are compared."""
    failure: str = ""
    """Why it did, in one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One setting, all repeats together."""

    setting: Setting
    process: ProcessKind
    """Process in which it ran: `baseline` runs in each."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of all timed steps of all repeats; empty if all failed."""
    ratios: tuple[float, ...] = ()
    """By repeat: the median step over that of `baseline`: see `find_reference_s`."""
    worst: Measurement | None = None
    """The most of each number over all repeats, but for `step_seconds`, which are the first one's."""
    failure: str = ""
    """Why it failed in the last repeat in which it did."""
    repeats: int = 1
    """Of the whole list."""
    missed_repeats: int = 0
    """Of those: in which it was not measured. What is known of it is of the others alone."""

    @property
    def ratio(self) -> float | None:
        """The shown value over all repeats, or None.

        From `FEWEST_REPEATS` on it is the geometric mean, around which the interval is; of fewer the median.
        """
        if len(self.ratios) >= FEWEST_REPEATS:
            return statistics.geometric_mean(self.ratios)
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def seconds(self) -> float | None:
        """The median step of all repeats, or None where there is none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a memory budget limits."""
        return None if self.worst is None else self.worst.peak_bytes

    def find_interval(self) -> tuple[float, float] | None:
        """Return where the geometric mean of the ratios is with 95% confidence, or None below `FEWEST_REPEATS`.

        The repeats are pairs: each has its own `baseline`, so that a machine that drifts drifts for both.
        """
        return find_ratio_interval(self.ratios)


def find_ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return where the geometric mean of ratios is with 95% confidence, or None with fewer than `FEWEST_REPEATS`.

    Ratios multiply, so the interval is Student's, of their logarithms: around the geometric mean, and not around a median.
    """
    if len(ratios) < FEWEST_REPEATS:
        return None
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
    return math.exp(mean - reach), math.exp(mean + reach)


def find_quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, p50 and p80, between the two nearest values where a quantile falls between them."""
    ordered = sorted(seconds)
    return _find_quantile(ordered, 0.2), statistics.median(ordered), _find_quantile(ordered, 0.8)


def merge_ranks(measurements: Sequence[Measurement]) -> Measurement:
    """Return what all ranks of a training measured in the same steps."""
    return Measurement(
        step_seconds=tuple(map(max, zip(*(one.step_seconds for one in measurements), strict=True))),
        **{name: _combine(max, (getattr(one, name) for one in measurements)) for name in _MOST},
        **{name: _combine(sum, (getattr(one, name) for one in measurements)) for name in _SUM},
    )


def find_reference_s(outcomes: Sequence[Outcome], index: int) -> float | None:
    """Return the step of `baseline` that the outcome at `index` is compared with, or None where it has none.

    That is the median of all steps of `baseline` in its process and repeat. Each time that `baseline` is built its steps are
    longer or shorter as a whole, and those before and behind a setting are no more like it than others are. `baseline` itself
    is compared with its own.
    """
    own = outcomes[index]
    if own.setting == BASELINE:
        return None if own.measurement is None else own.measurement.seconds
    return find_baseline_s(one for one in outcomes if (one.session, one.repeat) == (own.session, own.repeat))


def find_baseline_s(outcomes: Iterable[Outcome]) -> float | None:
    """Return the median of all steps of `baseline` among `outcomes`, or None without any."""
    measured = (one.measurement for one in outcomes if one.setting == BASELINE and one.measurement is not None)
    seconds = [step for measurement in measured for step in measurement.step_seconds]
    return statistics.median(seconds) if seconds else None


def find_ratio(outcomes: Sequence[Outcome], index: int) -> float | None:
    """Return the step time of the outcome at `index` over that of `baseline`, or None where one of them has none.

    A profile has none: its one step is slowed by what measures it, and no setting to compare.
    """
    if outcomes[index].setting == PROFILE:
        return None
    measurement, reference_s = outcomes[index].measurement, find_reference_s(outcomes, index)
    return None if measurement is None or reference_s is None else measurement.seconds / reference_s


def summarize(
    outcomes: Sequence[Outcome], processes: Sequence[ProcessKind], *, repeats: int | None = None
) -> tuple[Summary, ...]:
    """Return one summary for each setting and kind of process, in the order in which they first ran.

    A profile that was measured is no setting, and has none; one that failed has, which says why.

    Args:
        outcomes: In the order in which they ran.
        processes: By session.
        repeats: Of the whole list; None takes those that anything ran in. A setting that crashed does not come again.
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
"""The fields of a measurement, by what they are over the ranks."""


def _combine(function: Callable[[list[Any]], Any], values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _find_quantile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
