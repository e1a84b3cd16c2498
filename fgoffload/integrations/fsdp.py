"""Activation offload for models sharded with FSDP1 or FSDP2, with the function name that verl and ms-swift use."""

import dataclasses

import torch

from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.layers import find_fsdp_units
from fgoffload.integrations.pytorch.model import ModelOffload, offload_sites
from fgoffload.integrations.pytorch.patterns import unwrap
from fgoffload.transfer_config import TransferConfig

STRATEGIES = ("fsdp", "fsdp2")


def enable_activation_offloading(
    model: torch.nn.Module,
    strategy: str,
    enable_ckpt: bool = False,  # noqa: FBT001, FBT002 - positional for verl and ms-swift
    *,
    config: TransferConfig | None = None,
) -> ModelOffload:
    """Offload the activations of a sharded model's layers.

    The layers are the FSDP units, except embeddings. With `enable_ckpt`, each layer is checkpointed inside its unit, so a
    recompute does not gather parameters again. The layer's input is offloaded, and transformers' own checkpointing is disabled.

    Args:
        model: Model sharded by `fully_shard` or wrapped in `FullyShardedDataParallel`.
        strategy: `fsdp` or `fsdp2`. Any other value is an error. The model itself determines which kind of FSDP is used.
        enable_ckpt: Whether to checkpoint the layers.
        config: Offload options. If they disable offload, the model is unchanged, and no layer is checkpointed.

    Returns:
        The offload handle. Its methods `remove` and `close` also disable the checkpointing.

    Raises:
        ConfigError: `strategy` is unknown, no submodule of the model is an FSDP unit, or the model is already offloaded with
            other arguments.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}. For other models, use `fgoffload.offload`."
        )
    # FSDP1 gathers parameters in its wrapper's forward, so the region and the checkpoint go around the wrapped module.
    units = [
        dataclasses.replace(unit, module=unwrap(unit.module), is_checkpointed=enable_ckpt) for unit in find_fsdp_units(model)
    ]
    if not units:
        raise ConfigError(f"No submodule of {type(model).__name__} is an FSDP unit. Shard its layers before this call.")
    handle = offload_sites(model, units, config)
    if enable_ckpt and handle.config.enabled:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
    return handle
