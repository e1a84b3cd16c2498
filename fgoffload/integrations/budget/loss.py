"""Measures the part of a step between the last layer's forward and its backward: the output layer and the loss."""

from typing import Any, NamedTuple

from fgoffload.engine import Device
from fgoffload.engine.torch_internals import skip
from fgoffload.integrations.budget.memory import PeakMeter
from fgoffload.integrations.pytorch.outputs import find_tensor


class LossReading(NamedTuple):
    """Time and memory of the output layer and the loss, for one microbatch. Their forward ends with the model's forward."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_extra_bytes: int = 0
    """Peak bytes during their forward, minus the bytes before it."""
    backward_extra_bytes: int = 0
    """Peak bytes during their backward, minus the bytes before their forward."""


class LossMeter:
    """Measures the time and memory of the output layer and the loss in one step."""

    def __init__(self, device: Device, meter: PeakMeter) -> None:
        self._device, self._meter = device, meter
        self._events: list[Any] = []
        self._peaks_bytes: list[int] = []
        self._start_bytes = 0

    @skip
    def begin(self, output: Any) -> None:
        """Begin after the last layer's forward, which returned `output`."""
        tensor = find_tensor(output)
        if tensor is not None and tensor.requires_grad:
            self._start_bytes, _ = self._meter.read()
            self._record()
            tensor.register_hook(lambda _: self.record_end())  # type: ignore[no-untyped-call]

    @skip
    def record_end(self) -> None:
        """Record the end of the model's forward or, in the hook of `begin`, of the loss's backward."""
        if self._events:
            self._record()
            self._peaks_bytes.append(max(0, self._meter.read()[1] - self._start_bytes))

    def read(self) -> LossReading:
        """Return the measurements, or zeros if backward did not run."""
        if len(self._events) < 3:
            return LossReading()
        start, middle, end = self._events[:3]
        measure = self._device.measure_seconds
        return LossReading(measure(start, middle), measure(middle, end), *self._peaks_bytes[:2])

    def _record(self) -> None:
        self._events.append(self._device.record_event(self._device.current_stream(), is_timed=True))
