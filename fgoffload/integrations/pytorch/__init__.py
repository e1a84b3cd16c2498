"""Offload for plain PyTorch: modules selected by globs, blocks of code, manual regions, and individual tensors.

Import these functions from `fgoffload`: `offload`, `saved_tensors`, `region`, `offload_tensor`, `estimate_savings` and
`explain`.
"""

from fgoffload.integrations.pytorch.block import SavedTensors, saved_tensors
from fgoffload.integrations.pytorch.entry import explain, offload
from fgoffload.integrations.pytorch.estimate import SavingsEstimate, estimate_savings
from fgoffload.integrations.pytorch.marks import PlacedRegion, region
from fgoffload.integrations.pytorch.model import ModelOffload
from fgoffload.integrations.pytorch.tensors import OffloadedTensor, offload_tensor

__all__ = [
    "ModelOffload",
    "OffloadedTensor",
    "PlacedRegion",
    "SavedTensors",
    "SavingsEstimate",
    "estimate_savings",
    "explain",
    "offload",
    "offload_tensor",
    "region",
    "saved_tensors",
]
