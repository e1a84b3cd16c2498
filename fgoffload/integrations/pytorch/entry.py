"""Offloads a PyTorch model with one call, either chosen modules or within a memory budget."""

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
    """Offload the activations of chosen modules during forward, and reload them before backward needs them.

        handle = fgoffload.offload(model, {"layers.*.attn": "attn", "layers.*.mlp": "mlp"})
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            print(handle.stats().d2h_bytes)
        handle.close()

    Gradients are bitwise identical. Nothing is offloaded without grad mode or inside a checkpoint. Parameters and buffers stay
    on the GPU.

    Args:
        model: Any module tree. It need not be on its device yet. Compile it afterwards, or before its first forward.
        modules: Globs over the names of `named_modules()`, each with a tag for the statistics. For globs without tags, the tag
            is the last word of the module's name. `*` matches within one part of a name, `**` crosses dots. Omit it if the
            model's code uses `fgoffload.region`.
        config: Options of offload.
        device: Device of the tensors. None selects the accelerator of the model or of its first input, or the CPU.
        memory: GPU memory budget of this process, for example `60GiB`, or `auto` for the device's memory. It limits
            `torch.cuda.max_memory_allocated`, and some steps reset that counter. The first step measures. From the second step
            on, each part of each layer is kept, offloaded or recomputed.
        memory_reserve: Memory that `auto` leaves for the CUDA context, NCCL and fragmentation. None means 2 GiB.

    Returns:
        The handle, which is also a context manager. A second call with the same arguments returns the same handle.

    Raises:
        ConfigError: An argument is wrong, or the model is already offloaded with other arguments.
    """
    check_model(model)
    if memory is None and memory_reserve is None:
        return offload_sites(model, find_sites(model, modules), config, device=device)
    if memory is not None and modules != ():
        raise ConfigError(f"modules {modules!r} and memory {memory!r} exclude each other. Pass only one of them.")
    from fgoffload.integrations.budget.handle import BudgetOffload  # a circular import at the top

    known = find_handle(model)
    if isinstance(known, BudgetOffload) and known.is_made_with(memory, config, device=device, reserve=memory_reserve):
        return known
    return BudgetOffload(model, memory, config, device=device, reserve=memory_reserve)


def explain(handle: Any) -> str:
    """Return a plan as text: each layer's bytes and treatment, and the time and peak memory of a step.

    Args:
        handle: Handle of `offload` or an `OffloadCallback`, with `memory`. The callback keeps its plan after training.

    Raises:
        ConfigError: `handle` has no memory budget.
    """
    if not hasattr(handle, "explain"):
        raise ConfigError(
            f"this {type(handle).__name__} has no plan. Pass the handle from fgoffload.offload(model, memory=...), or an "
            "OffloadCallback(memory=...)."
        )
    return str(handle.explain())
