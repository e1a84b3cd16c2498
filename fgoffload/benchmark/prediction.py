"""What settings are predicted to take, and how far that is from what they took. Numbers in, numbers out."""

import dataclasses
import enum
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fgoffload.benchmark.measurement import Measurement, Summary
from fgoffload.benchmark.settings import ProcessKind, Setting


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How far a prediction may be from the measurement, as parts: 0.05 for 5%."""

    step: float
    """Of the step time."""
    peak: float
    """Of the peak."""


class Source(enum.Enum):
    """Where a prediction has its times and bytes from."""

    TABLE = "table"  # the hardware table, and formulas
    PROFILE = "profile"  # one measured step with everything kept

    @property
    def limits(self) -> Limits:
        """What its predictions are held to."""
        return Limits(step=0.08, peak=0.05) if self is Source.TABLE else Limits(step=0.04, peak=0.02)

    @property
    def title(self) -> str:
        """For headings."""
        return "from the hardware table" if self is Source.TABLE else "from the profile"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a setting."""

    step_s: float
    """Seconds of a step."""
    ratio: float
    """Step time over that of `nothing`, as simulated too."""
    peak_bytes: int
    """Of the fullest rank."""
    static_bytes: int
    """Of `peak_bytes`: what is there all the time."""

    def find_peak(self, measurement: Measurement) -> int:
        """Return what the peak of `measurement` is compared with: where no allocator counted it, activations alone."""
        return self.peak_bytes - (self.static_bytes if measurement.peak_allocated_bytes is None else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted of one setting."""

    predictions: Mapping[Source, Prediction] = dataclasses.field(default_factory=dict)
    """By source; a source that cannot say anything of it is absent."""
    reasons: Mapping[Source, str] = dataclasses.field(default_factory=dict)
    """Why one is absent, where that is no matter of course."""


Forecasts = Mapping[Setting, Forecast]
"""By setting."""

NO_FORECASTS: Forecasts = types.MappingProxyType({})
"""Where nothing is predicted."""


def choose_source(forecasts: Forecasts) -> Source:
    """Return the source of what is shown beside measurements: a profile, which is of this training, where there is one."""
    has_profile = any(Source.PROFILE in forecast.predictions for forecast in forecasts.values())
    return Source.PROFILE if has_profile else Source.TABLE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One setting: predicted beside measured."""

    setting: Setting
    process: ProcessKind
    """That it was measured in."""
    source: Source
    """Of the prediction."""
    measured_step_s: float
    """The median."""
    predicted_step_s: float
    """Seconds."""
    measured_ratio: float | None
    """Over `nothing` of the same process."""
    predicted_ratio: float
    """Over `nothing`, as predicted."""
    measured_peak_bytes: int | None
    """The allocator's, or of activations alone where it does not count."""
    predicted_peak_bytes: int
    """Of the same."""

    @property
    def step_error(self) -> float:
        """What was predicted above the measured step time, as a part of it; below 0 where less was."""
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def peak_error(self) -> float | None:
        """The same of the peak, or None where none was measured."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else None

    @property
    def badness(self) -> float:
        """The larger of both errors, each in parts of its limit: above 1 where one is missed."""
        limits = self.source.limits
        return max(abs(self.step_error) / limits.step, abs(self.peak_error or 0.0) / limits.peak)

    def to_fields(self) -> dict[str, Any]:
        """Return the numbers by name, for JSON, with errors in percent."""
        fields = dataclasses.asdict(self)
        return fields | {
            "setting": self.setting.name,
            "process": self.process.value,
            "source": self.source.value,
            "step_error_percent": _to_percent(self.step_error),
            "peak_error_percent": _to_percent(self.peak_error),
        }


def compare(summaries: Iterable[Summary], forecasts: Forecasts, source: Source) -> list[Comparison]:
    """Return the settings that `source` predicts and that were measured, the worst prediction first.

    Args:
        summaries: Of all settings.
        forecasts: By setting.
        source: Of the predictions.
    """
    found = (_compare_one(summary, forecasts.get(summary.setting, Forecast()), source) for summary in summaries)
    return sorted((one for one in found if one is not None), key=lambda one: one.badness, reverse=True)


def list_prediction_numbers(measurement: Measurement, forecast: Forecast) -> dict[str, float | int | None]:
    """Return what is predicted for one measurement, by column of the CSV file: see `PREDICTION_COLUMNS`."""
    numbers: dict[str, float | int | None] = {}
    for source, prediction in forecast.predictions.items():
        peak_bytes, measured_bytes = prediction.find_peak(measurement), measurement.peak_bytes
        numbers |= {
            f"{source.value}_step_s": round(prediction.step_s, 6),
            f"{source.value}_step_error_percent": _to_percent(prediction.step_s / measurement.seconds - 1),
            f"{source.value}_over_nothing": round(prediction.ratio, 6),
            f"{source.value}_peak_bytes": peak_bytes,
            f"{source.value}_peak_error_percent": _to_percent(peak_bytes / measured_bytes - 1 if measured_bytes else None),
        }
    return numbers


PREDICTION_COLUMNS: Sequence[str] = tuple(
    f"{source.value}_{what}"
    for source in Source
    for what in ("step_s", "step_error_percent", "over_nothing", "peak_bytes", "peak_error_percent")
)
"""Of the CSV file."""


def _compare_one(summary: Summary, forecast: Forecast, source: Source) -> Comparison | None:
    prediction, worst, seconds = forecast.predictions.get(source), summary.worst, summary.seconds
    if prediction is None or worst is None or seconds is None:
        return None
    return Comparison(
        setting=summary.setting,
        process=summary.process,
        source=source,
        measured_step_s=seconds,
        predicted_step_s=prediction.step_s,
        measured_ratio=summary.ratio,
        predicted_ratio=prediction.ratio,
        measured_peak_bytes=worst.peak_bytes,
        predicted_peak_bytes=prediction.find_peak(worst),
    )


def _to_percent(part: float | None) -> float | None:
    return None if part is None else round(100 * part, 2)
