"""Engine that offloads and reloads saved tensors. It depends on torch, but not on a training framework."""

from fgoffload.engine.capture import CapturedRegion
from fgoffload.engine.device import AcceleratorDevice, CpuDevice, Device, HostSlab, find_device
from fgoffload.engine.engine import OffloadEngine
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.region import Region, Saving, is_in_backward, is_inert
from fgoffload.engine.staging import CapturedForward
from fgoffload.engine.stats import KeptReason, StepStats, TagStats, TimeKind

__all__ = [
    "AcceleratorDevice",
    "ActivationLedger",
    "CapturedForward",
    "CapturedRegion",
    "CpuDevice",
    "Device",
    "Group",
    "Hazard",
    "HostSlab",
    "KeptReason",
    "Lane",
    "OffloadEngine",
    "Region",
    "Saving",
    "StepStats",
    "TagStats",
    "TimeKind",
    "find_device",
    "is_in_backward",
    "is_inert",
]
