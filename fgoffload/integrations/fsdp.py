"""Offload of models that FSDP1 or FSDP2 shards, in one call with the name that verl and ms-swift know."""

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
    """Offload what the layers of a sharded model save for backward.

    Layers are the parts that FSDP shards one by one, embeddings left out. With `enable_ckpt` they are checkpointed inside of
    these parts, where a recompute gathers no parameters again, and their inputs are offloaded. That switches transformers' own
    checkpointing off.

    Args:
        model: After `fully_shard` or inside of `FullyShardedDataParallel`.
        strategy: `fsdp` for FSDP1, `fsdp2` for `fully_shard`. Both are found by themselves.
        enable_ckpt: Whether to checkpoint the layers.
        config: What is offloaded, and where to. Not enabled, it changes nothing: no layer is checkpointed then.

    Returns:
        The handle. Its `remove` and `close` end the checkpointing as well.

    Raises:
        ConfigError: `strategy` is another one, FSDP shards no part of the model, or the model is offloaded already with other
            arguments.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}. For other models use `fgoffload.offload`."
        )
    # FSDP1 gathers in the forward of its wrapper: the region, and the checkpoint, are around what it wraps.
    units = [dataclasses.replace(unit, module=unwrap(unit.module)) for unit in find_fsdp_units(model)]
    if not units:
        raise ConfigError(f"FSDP shards no part of {type(model).__name__} by itself. Shard its layers, then call this.")
    handle = offload_sites(model, [dataclasses.replace(unit, is_checkpointed=enable_ckpt) for unit in units], config)
    if enable_ckpt and handle.config.enabled:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
    return handle
