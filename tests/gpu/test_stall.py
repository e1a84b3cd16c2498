"""Tests that events measure kernel time, not launch time, on a stalled device that the host is ahead of."""

import time

import torch

from fgoffload.engine import AcceleratorDevice

LATE_S = 0.01


def measure(device: AcceleratorDevice, stall_s: float) -> float:
    """Return the measured seconds of a small kernel that the host launches late."""
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    if stall_s:
        device.stall(stall_s)
    start = device.record_event(device.current_stream(), is_timed=True)
    time.sleep(LATE_S)
    x.add_(1)
    end = device.record_event(device.current_stream(), is_timed=True)
    device.synchronize(end)
    return device.measure_seconds(start, end)


def test_launch_delays_do_not_count_as_kernel_time_on_a_stalled_device():
    device = AcceleratorDevice()
    measure(device, 0.0)
    assert measure(device, 0.0) >= LATE_S
    assert measure(device, 5 * LATE_S) < LATE_S / 2
