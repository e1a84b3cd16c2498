"""Offloads selected modules of a PyTorch model, or plans the whole model within a memory budget."""

from typing import Any

import torch

from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.model import ModelOffload, find_handle, offload_sites
from fgoffload.integrations.pytorch.patterns import Patterns, check_model, find_sites
from fgoffload.transfer_config import TransferConfig


def offload(
    model: torch.nn.Module,
    modules: Patterns = (),
    config: TransferConfig | None = None,
    *,
    device: DeviceChoice = None,
    memory: str | int | None = None,
    memory_reserve: str | int | None = None,
) -> ModelOffload:
    """Offload activations of a model during forward, and reload them for backward.

        handle = fgoffload.offload(model, {"layers.*.attn": "attn", "layers.*.mlp": "mlp"})
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            print(handle.stats().d2h_bytes)
        handle.close()

    Gradients are bitwise identical to training without offload. Parameters and buffers stay on the GPU. Nothing is offloaded
    with gradients disabled or inside a checkpoint.

    Args:
        model: Any module. You may move it to its device later. If you compile it, call `offload` before its first forward.
        modules: Globs over the names of `named_modules()`: a list, or a dict from each glob to its tag in the statistics. The
            default tag is the last word of the module's name. `*` matches within one part of a name, and `**` also matches
            dots. Omit `modules` if the model's code uses `fgoffload.region`.
        config: Offload options.
        device: Device of the tensors. None selects the accelerator of the model or of its first input, or else the CPU.
        memory: GPU memory budget of this process, for example `60GiB`. `auto` uses the device's memory minus `memory_reserve`.
            The budget limits `torch.cuda.max_memory_allocated`, a counter that fgoffload resets in some steps. The first step
            measures the model. Later steps keep, offload or recompute each part of each layer.
        memory_reserve: Memory that `auto` reserves for the CUDA context, NCCL and fragmentation. None means 2 GiB.

    Returns:
        The handle, which is also a context manager. A second call with the same arguments returns the same handle.

    Raises:
        ConfigError: An argument is invalid, or the model is already offloaded with other arguments.
    """
    check_model(model)
    if memory is None and memory_reserve is None:
        return offload_sites(model, find_sites(model, modules), config, device=device)
    if memory is not None and modules != ():
        raise ConfigError(f"modules {modules!r} and memory {memory!r} are mutually exclusive. Pass only one of them.")
    from fgoffload.integrations.budget.handle import BudgetOffload  # here, to avoid a circular import

    known = find_handle(model)
    if isinstance(known, BudgetOffload) and known.is_made_with(memory, config, device=device, reserve=memory_reserve):
        return known
    return BudgetOffload(model, memory, config, device=device, reserve=memory_reserve)


def explain(handle: Any) -> str:
    """Return the plan for a memory budget as text: each layer's bytes and actions, and the time and peak memory of a step.

    Args:
        handle: Handle or `OffloadCallback` that was created with `memory`. A callback can be explained even after training.

    Raises:
        ConfigError: `handle` has no memory budget.
    """
    if not hasattr(handle, "explain"):
        raise ConfigError(
            f"this {type(handle).__name__} has no memory budget, so it has no plan. See `handle.stats()`, or pass the handle "
            "from fgoffload.offload(model, memory=...) or an OffloadCallback(memory=...)."
        )
    return str(handle.explain())
