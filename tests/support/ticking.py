"""A device whose clock advances by known seconds, so that tests can check measured times exactly."""

from fgoffload.engine import CpuDevice, Hazard

D2H_S, H2D_S = 2.0, 3.0
"""Seconds of one copy."""
WAIT_S = {Hazard.BUFFER_UNFILLED: 5.0, Hazard.SOURCE_STILL_COPIED: 7.0}
"""Seconds that compute waits for a reload, and for an offload if the window is full."""
OTHER_WAIT_S = 100.0
"""Seconds that a copy waits for earlier work, which must not count as its own time."""


class TickingCpuDevice(CpuDevice):
    """A CPU device on which only copies and waits take time. Tests can advance `now_s`."""

    now_s = 0.0

    def record_event(self, stream, *, is_timed=False):
        return self.now_s

    def is_done(self, event):
        return False  # so compute must wait for each copy to the host that exceeds the window

    def copy_bytes(self, *, destination, source, stream):
        self.now_s += D2H_S if stream is self.d2h_stream else H2D_S
        super().copy_bytes(destination=destination, source=source, stream=stream)

    def wait_event(self, stream, event, hazard):
        self.now_s += WAIT_S.get(hazard, OTHER_WAIT_S)
