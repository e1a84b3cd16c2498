"""Predicted step times and peaks of settings, as plain numbers for the table, the picture and the CSV file."""

import dataclasses
import enum
from collections.abc import Mapping

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
