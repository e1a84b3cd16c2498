"""Engine that offloads and reloads saved tensors. It needs torch, but no framework."""

from fgoffload.engine.capture import Capture, CapturedRegion
from fgoffload.engine.device import AcceleratorDevice, CpuDevice, Device, HostSlab, find_device
from fgoffload.engine.engine import OffloadEngine
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.ledger import ActivationLedger, LedgerSample
from fgoffload.engine.region import Region, Saving, is_in_backward, is_inert
from fgoffload.engine.staging import CapturedForward
from fgoffload.engine.stats import KeptReason, StepStats, TagStats, TimeKind

__all__ = [
    "AcceleratorDevice",
    "ActivationLedger",
    "Capture",
    "CapturedForward",
    "CapturedRegion",
    "CpuDevice",
    "Device",
    "Group",
    "Hazard",
    "HostArena",
    "HostBlock",
    "HostSlab",
    "KeptReason",
    "Lane",
    "LedgerSample",
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
