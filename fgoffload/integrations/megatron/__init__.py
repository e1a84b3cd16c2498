"""Fine-grained activation offload for Megatron-Core.

    from fgoffload import OffloadConfig
    from fgoffload.integrations import megatron

    offload = megatron.apply(OffloadConfig(offload_modules=("core_attn", "attn_proj", "expert_fc1")))
    ...  # build the model as usual, and train
    megatron.remove(offload)

Call `apply` before you create the model's `TransformerConfig`: it enables Megatron's own offload sites in every config that is
created later. The sites that Megatron lacks need no config; the model's first forward adds them.
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
    # Import torch only on demand: this package also contains the modules that read argument files, which run without torch.
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch()
    return getattr(importlib.import_module(f"{__name__}.{_IMPORTED_LATER[name]}"), name)


def apply(config: OffloadConfig, *, device: "Device | None" = None) -> "MegatronOffload":
    """Connect Megatron-Core's offload sites to our engine, and add the sites that Megatron-Core lacks.

    Args:
        config: Offload settings.
        device: Device of the model; None selects CUDA if it is available, otherwise the CPU.

    Returns:
        The integration, which owns the engine. Pass it to `remove` to undo everything.

    Raises:
        IntegrationError: torch or Megatron-Core is not installed, Megatron-Core lacks a symbol, or offload is already applied.
        PlanError: The plan file cannot be read.
    """
    require_torch()
    from fgoffload.integrations.megatron.interface import is_replaced
    from fgoffload.integrations.megatron.patching.patches import Patches

    if is_replaced():
        raise IntegrationError(
            "Activation offload is already applied in this process. First call `remove` on the object that `apply` returned."
        )
    with contextlib.ExitStack() as undo:
        patches = undo.enter_context(Patches())
        offload = _apply(config, patches, device)
        undo.pop_all()
    logger.info("Activation offload is on for %s.", " ".join(offload.selected) or "no tags")
    return offload


def _apply(config: OffloadConfig, patches: "Patches", device: "Device | None") -> "MegatronOffload":
    from fgoffload.engine import OffloadEngine, find_device
    from fgoffload.integrations.megatron.adapter.dispatchers import free_recomputed_graphs
    from fgoffload.integrations.megatron.adapter.layers import wrap_forward
    from fgoffload.integrations.megatron.adapter.model_config import set_flags
    from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
    from fgoffload.integrations.megatron.host_waits.waits import wrap_waits
    from fgoffload.integrations.megatron.interface import is_marked_not_offloadable, replace_interface
    from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
    from fgoffload.integrations.megatron.recompute.checkpoints import wrap_checkpoints

    found: list[MegatronOffload] = []
    for wrap in (replace_interface, wrap_forward, wrap_checkpoints, wrap_waits):
        wrap(patches, lambda: found[0])
    free_recomputed_graphs(patches)
    engine = OffloadEngine(
        device=device or find_device("cpu" if needs_cpu_support() else "cuda"),
        policy=config.transfer_policy,
        min_offloaded_numel=config.min_offloaded_tensor_size,
        keep=is_marked_not_offloadable,
        host_budget_bytes=config.offload_host_budget_bytes,
    )
    found.append(MegatronOffload(config, engine, undo=patches.remove))
    if config.is_auto:
        from fgoffload.integrations.megatron.auto.auto_offload import AutoOffload

        found[0].measurement = AutoOffload(config, engine, use_plan=found[0].actions.use_plan)
    set_flags(patches, config, found[0].selected)
    return found[0]


def remove(offload: "MegatronOffload") -> None:
    """Undo `apply`: restore Megatron's symbols, and free all of the engine's memory that no autograd graph still needs."""
    offload.remove()
