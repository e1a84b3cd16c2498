"""Trains three steps with the engine and checks every bit: a script, for tools that watch a whole process.

`python one_step.py [--leave-out HAZARD] [--read-past-the-end]` ends with 0 and prints `same bits` where they are.

One compute stream, one shape, no sleeps: what a tool finds here is the engine's, or was left out on purpose.
"""

import argparse
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from support.chain import make_weights, run_chain, take_gradients

from fgoffload import TransferPolicy
from fgoffload.engine import AcceleratorDevice, CpuDevice, Device, Hazard, OffloadEngine

SIZE = 128
NBYTES = SIZE * SIZE * 4


class LeavesOut(Device):
    """Mixed in before a device: does not queue the waits against one hazard."""

    left_out: Hazard | None = None

    def wait_event(self, stream, event, hazard: Hazard) -> None:
        if hazard is not self.left_out:
            super().wait_event(stream, event, hazard)

    def wait_stream(self, stream, other, hazard: Hazard) -> None:
        if hazard is not self.left_out:
            super().wait_stream(stream, other, hazard)


class LeavesOutGpu(LeavesOut, AcceleratorDevice):
    pass


class LeavesOutCpu(LeavesOut, CpuDevice):
    pass


def read_past_the_end(device_type: str) -> None:
    """Do what a memory checker must find: read behind the last byte of an allocation."""
    tensor = torch.zeros(256, device=device_type)
    longer = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, 1 << 22)
    torch.empty(0, device=device_type).set_(longer, 0, (1 << 20,), (1,)).sin().sum().item()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--leave-out", choices=[hazard.name for hazard in Hazard])
    parser.add_argument("--read-past-the-end", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = LeavesOutCpu() if options.cpu else LeavesOutGpu()
    device.left_out = Hazard[options.leave_out] if options.leave_out else None

    weights = make_weights(device.type, 3, size=SIZE, dtype=torch.float32)
    run_chain(None, weights)
    expected = take_gradients(weights)
    policy = TransferPolicy(window_bytes=NBYTES, prefetch_bytes=2 * NBYTES)
    engine = OffloadEngine(device=device, policy=policy, host_budget_bytes=4 << 20)
    same = True
    for _ in range(3):
        run_chain(engine, weights)
        found = take_gradients(weights)
        same &= all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    same &= engine.finish_step().d2h_bytes > 0
    engine.close()
    if options.read_past_the_end:
        read_past_the_end(device.type)
    sys.stdout.write("same bits\n" if same else "other bits\n")
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
