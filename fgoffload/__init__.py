"""Fine-grained, per-module activation offload for Megatron-style training.

Tensors that autograd saves inside named modules leave the device for pinned host memory during forward and are back before
backward needs them, with results equal to the bit. This package imports neither torch nor a framework until you ask for a
part that needs them: `fgoffload.engine` needs torch, `fgoffload.integrations.megatron` needs megatron-core.
"""

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError, IntegrationError, InternalError, OffloadError, PlanError, StateError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.policy import HostMemory, TransferPolicy
from fgoffload.tags import Tag, TagRegistry, default_tags
from fgoffload.transfer_config import TransferConfig

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ConfigError",
    "HostMemory",
    "IntegrationError",
    "InternalError",
    "OffloadConfig",
    "OffloadError",
    "OffloadPlan",
    "PlanError",
    "Site",
    "StateError",
    "Tag",
    "TagRegistry",
    "TransferConfig",
    "TransferPolicy",
    "default_tags",
]
