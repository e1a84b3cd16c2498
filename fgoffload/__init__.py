"""Fine-grained, per-module activation offload for Megatron-style training and plain PyTorch.

Tensors that autograd saves inside chosen modules are offloaded to pinned host memory during forward and reloaded before
backward needs them. Results are bitwise identical to those without offload. `import fgoffload` does not import torch or a
framework. `fgoffload.offload` and `fgoffload.engine` need torch, and `fgoffload.integrations.megatron` needs megatron-core.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fgoffload.config import OffloadConfig
from fgoffload.errors import BudgetError, ConfigError, IntegrationError, InternalError, OffloadError, PlanError, StateError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.tags import Tag, TagRegistry, default_tags
from fgoffload.transfer_config import HostMemory, TransferConfig
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import GIB, MIB

if TYPE_CHECKING:
    from fgoffload.integrations.pytorch import (
        ModelOffload,
        OffloadedTensor,
        PlacedRegion,
        SavedTensors,
        SavingsEstimate,
        estimate_savings,
        explain,
        offload,
        offload_tensor,
        region,
        saved_tensors,
    )

__version__ = "0.2.0"

__all__ = [
    "Action",
    "BudgetError",
    "ConfigError",
    "GIB",
    "HostMemory",
    "IntegrationError",
    "InternalError",
    "MIB",
    "ModelOffload",
    "OffloadConfig",
    "OffloadError",
    "OffloadPlan",
    "OffloadedTensor",
    "PlacedRegion",
    "PlanError",
    "SavedTensors",
    "SavingsEstimate",
    "Site",
    "StateError",
    "Tag",
    "TagRegistry",
    "TransferConfig",
    "TransferPolicy",
    "default_tags",
    "estimate_savings",
    "explain",
    "offload",
    "offload_tensor",
    "region",
    "saved_tensors",
]


def __getattr__(name: str) -> Any:
    # `import fgoffload` must not import torch, so names that need torch are imported on first use.
    if name in __all__:
        try:
            return getattr(importlib.import_module("fgoffload.integrations.pytorch"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(f"fgoffload.{name} needs torch: pip install 'fgoffload[torch]'", name="torch") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
