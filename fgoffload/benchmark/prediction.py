"""Predicted step times and peaks of settings, as plain numbers for the table, the picture and the CSV file."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from fgoffload.benchmark.measurement import Measurement
from fgoffload.benchmark.settings import Setting


class Source(enum.Enum):
    """Origin of a prediction's times and bytes."""

    TABLE = "table"  # the hardware table, and formulas
    PROFILE = "profile"  # one measured step with everything kept on the device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated step of one setting."""

    step_s: float
    """Step time in seconds."""
    ratio: float
    """Step time relative to the simulated step of `baseline`."""
    peak_bytes: int
    """Peak bytes, the maximum over ranks."""
    static_bytes: int
    """Bytes of `peak_bytes` that are always allocated."""

    def find_peak(self, measurement: Measurement) -> int:
        """Return the bytes to compare with the peak of `measurement`: only activations if no allocator counted bytes."""
        return self.peak_bytes - (self.static_bytes if measurement.peak_allocated_bytes is None else 0)


Predictions = Mapping[Setting, Mapping[Source, Prediction]]
"""Predictions by setting and source. A source that cannot simulate a setting is missing."""


def choose_source(predictions: Predictions) -> Source:
    """Return the source for the table's columns: the profile if there is one, since it was measured on this training."""
    return Source.PROFILE if any(Source.PROFILE in own for own in predictions.values()) else Source.TABLE


COLUMNS: Sequence[str] = tuple(
    f"{source.value}_{what}" for source in Source for what in ("step_s", "over_baseline", "peak_bytes")
)
"""Columns of predictions in the CSV file."""


def list_numbers(measurement: Measurement, predictions: Mapping[Source, Prediction]) -> dict[str, float]:
    """Return the predictions for one measurement, by the names in `COLUMNS`."""
    numbers: dict[str, float] = {}
    for source, one in predictions.items():
        values = {
            "step_s": round(one.step_s, 6),
            "over_baseline": round(one.ratio, 6),
            "peak_bytes": one.find_peak(measurement),
        }
        numbers |= {f"{source.value}_{what}": value for what, value in values.items()}
    return numbers
