"""Measures the energy, clock and power of a GPU over a period, for other scripts in this folder.

The meter reads NVML, the driver's management library, through nvidia-ml-py (`pip install nvidia-ml-py`). The measured work can
run in another process. The energy counter of a GPU updates only every few dozen milliseconds, so measure at least a second of
work at a time.
"""

import contextlib
import dataclasses
import os
import statistics
import threading
from collections.abc import Iterator
from typing import Any

from fgoffload.errors import ConfigError

SAMPLE_SECONDS = 0.01


@dataclasses.dataclass
class Reading:
    """Energy over one period, with samples of clock and power."""

    joules: float = 0.0
    clocks_mhz: list[int] = dataclasses.field(default_factory=list)
    """SM clock in each sample."""
    watts: list[float] = dataclasses.field(default_factory=list)
    is_capped: list[bool] = dataclasses.field(default_factory=list)
    """Whether the power limit lowered the clock, for each sample."""


@dataclasses.dataclass(frozen=True)
class Energy:
    """Summary of several readings of the same work."""

    joules_per_step: float
    clock_mhz: float
    watts: float
    capped_part: float
    """Fraction of the samples in which the power limit lowered the clock."""


class EnergyMeter:
    """Meter for the first GPU in `CUDA_VISIBLE_DEVICES`. As a context manager, it shuts down NVML on exit.

    Raises:
        ConfigError: nvidia-ml-py is not installed, the GPU does not exist, or the GPU has no energy counter.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise ConfigError("Measuring energy needs nvidia-ml-py: pip install nvidia-ml-py.") from None
        self._nvml: Any = pynvml
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        try:
            pynvml.nvmlInit()
            by_name = pynvml.nvmlDeviceGetHandleByUUID if name.startswith("GPU-") else pynvml.nvmlDeviceGetHandleByIndex
            self._device = by_name(name if name.startswith("GPU-") else int(name))
            self._read_joules()
        except (pynvml.NVMLError, ValueError) as error:
            raise ConfigError(
                f"The energy of GPU {name!r} cannot be read: {error}. Use a machine that has this GPU and its driver."
            ) from None

    def __enter__(self) -> "EnergyMeter":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down NVML."""
        self._nvml.nvmlShutdown()

    @contextlib.contextmanager
    def read(self) -> Iterator[Reading]:
        """Measure the body. The yielded reading is complete when the body ends."""
        reading, is_over = Reading(), threading.Event()

        def sample() -> None:
            while not is_over.wait(SAMPLE_SECONDS):
                self._sample(reading)

        sampler = threading.Thread(target=sample, daemon=True)
        before = self._read_joules()
        sampler.start()
        try:
            yield reading
        finally:
            is_over.set()
            sampler.join()
            reading.joules = self._read_joules() - before

    def _read_joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)) / 1e3  # total since the driver was loaded

    def _sample(self, reading: Reading) -> None:
        nvml, device = self._nvml, self._device
        reading.clocks_mhz.append(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
        reading.watts.append(nvml.nvmlDeviceGetPowerUsage(device) / 1e3)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
        reading.is_capped.append(bool(reasons & nvml.nvmlClocksEventReasonSwPowerCap))


def summarize(readings: list[Reading], *, steps: int) -> Energy:
    """Summarize `readings`, which cover `steps` steps in total."""

    def average(name: str) -> float:
        samples = [sample for reading in readings for sample in getattr(reading, name)]
        return statistics.fmean(samples) if samples else 0.0

    joules = sum(reading.joules for reading in readings)
    return Energy(joules / steps, average("clocks_mhz"), average("watts"), average("is_capped"))
