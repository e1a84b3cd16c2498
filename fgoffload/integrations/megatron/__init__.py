"""Fine-grained activation offload for Megatron-Core.

    from fgoffload import OffloadConfig
    from fgoffload.integrations import megatron

    offload = megatron.apply(OffloadConfig(offload_modules=("core_attn", "attn_proj", "expert_fc1")))
    ...  # build the model as usual, and train
    megatron.remove(offload)

Call `apply` before the model's `TransformerConfig` is created. Megatron's layers read from it which of their sites are on, and
`apply` sets that in every config created afterwards. Our own sites need no config, and are added in a model's first forward.
"""

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Any

from fgoffload.config import OffloadConfig
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import require_torch

if TYPE_CHECKING:
    from fgoffload.engine import Device
    from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
    from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support
    from fgoffload.integrations.megatron.patching.patches import Patches

logger = logging.getLogger(__name__)

__all__ = ["MegatronOffload", "apply", "apply_cpu_support", "remove"]


_IMPORTED_LATER = {"MegatronOffload": "adapter.offload", "apply_cpu_support": "patching.cpu_support"}


def __getattr__(name: str) -> Any:
    # Importing this package must not import torch, since the modules that read argument files are in it and do not need torch.
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch()
    return getattr(importlib.import_module(f"{__name__}.{_IMPORTED_LATER[name]}"), name)


def apply(config: OffloadConfig, *, device: "Device | None" = None) -> "MegatronOffload":
    """Make our engine serve Megatron-Core's offload sites, and add sites that Megatron-Core lacks.

    Args:
        config: Settings of offload.
        device: Device of the model; None selects CUDA if it is available, otherwise the CPU.

    Returns:
        The integration, which holds the engine. `remove` undoes everything.

    Raises:
        IntegrationError: torch or Megatron-Core is not installed, Megatron-Core lacks a symbol, or offload is applied already.
        PlanError: The plan file cannot be read.
    """
    require_torch()
    from fgoffload.integrations.megatron.interface import is_replaced
    from fgoffload.integrations.megatron.patching.patches import Patches

    if is_replaced():
        raise IntegrationError(
            "Activation offload is applied already in this process. First call `remove` on the object that `apply` returned."
        )
    with contextlib.ExitStack() as undo:
        patches = undo.enter_context(Patches())
        offload = _apply(config, patches, device)
        undo.pop_all()
    logger.info("Activation offload is on for %s.", " ".join(offload.selected) or "no tag")
    return offload


def _apply(config: OffloadConfig, patches: "Patches", device: "Device | None") -> "MegatronOffload":
    from fgoffload.engine import OffloadEngine, find_device
    from fgoffload.integrations.megatron.adapter.dispatchers import free_inputs_of_recompute
    from fgoffload.integrations.megatron.adapter.layers import follow_forward
    from fgoffload.integrations.megatron.adapter.model_config import set_flags
    from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
    from fgoffload.integrations.megatron.host_waits.waits import step_aside
    from fgoffload.integrations.megatron.interface import is_marked_to_stay, replace_interface
    from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
    from fgoffload.integrations.megatron.recompute.checkpoints import follow_checkpoints

    found: list[MegatronOffload] = []
    for follow in (replace_interface, follow_forward, follow_checkpoints, step_aside):
        follow(patches, lambda: found[0])
    free_inputs_of_recompute(patches)
    engine = OffloadEngine(
        device=device or find_device("cpu" if needs_cpu_support() else "cuda"),
        policy=config.transfer_policy,
        min_offloaded_numel=config.min_offloaded_tensor_size,
        keep=is_marked_to_stay,
        host_budget_bytes=config.offload_host_budget_bytes,
    )
    found.append(MegatronOffload(config, engine, undo=patches.remove))
    if config.is_auto:
        from fgoffload.integrations.megatron.auto.auto_offload import AutoOffload

        found[0].measurement = AutoOffload(config, engine, use_plan=found[0].actions.use_plan)
    set_flags(patches, config, found[0].selected)
    return found[0]


def remove(offload: "MegatronOffload") -> None:
    """Undo `apply`: restore Megatron's symbols and free all memory that no graph needs."""
    offload.remove()
