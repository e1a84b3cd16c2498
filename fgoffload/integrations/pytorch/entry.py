"""Offloads a PyTorch model by one call, either named modules or within a memory budget."""

from typing import Any

import torch

from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.model import ModelOffload, offload_sites
from fgoffload.integrations.pytorch.patterns import Patterns, find_sites
from fgoffload.transfer_config import TransferConfig

NO_MEMORY = "memory_reserve {!r} has no effect without memory. Give memory='auto', or leave memory_reserve out."


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

    Gradients are bitwise identical. Forwards without grad mode and code inside a checkpoint run as without offload. Parameters
    and buffers stay on the GPU.

    Args:
        model: Any module tree. It need not be on its device yet. Compile it afterwards, or before its first forward.
        modules: Globs over the names of `named_modules()`, each with a tag for the statistics. For globs alone, the tag is the
            last word of the module's name. `*` matches within one part of a name, `**` crosses dots. Leave it out if the
            model places its regions with `fgoffload.region`.
        config: Options of offload.
        device: Device of the tensors. None takes the accelerator of the model or of its first input, or the CPU.
        memory: GPU memory of the training process, such as `60GiB`, or `auto` for the device's memory. It is what
            `torch.cuda.max_memory_allocated` counts; steps that compare it with the plan reset that counter. The first step
            measures. From the second step on each part of each layer is kept, offloaded or recomputed.
        memory_reserve: Memory that `auto` leaves for the CUDA context, NCCL and fragmentation. None leaves 2 GiB.

    Returns:
        The handle, a context manager that closes it. A second call with the same arguments returns the same handle.

    Raises:
        ConfigError: An argument is wrong, or the model is already offloaded with other arguments.
    """
    if memory is None:
        if memory_reserve is not None:
            raise ConfigError(NO_MEMORY.format(memory_reserve))
        return offload_sites(model, find_sites(model, modules), config, device=device)
    if modules != ():
        raise ConfigError(
            f"modules {modules!r} and memory {memory!r} exclude each other: a budget chooses the modules. Give one."
        )
    from fgoffload.integrations.budget.handle import offload_within  # it derives from this module's handle

    return offload_within(model, memory, config, device=device, reserve=memory_reserve)


def explain(handle: Any) -> str:
    """Return a plan as text: each layer's treatment and bytes, the step's time and peak.

    Args:
        handle: Handle of `offload` or an `OffloadCallback`, with `memory`. The callback keeps its plan after the training.

    Raises:
        ConfigError: `handle` is neither, or has no memory budget.
    """
    if not hasattr(handle, "explain"):
        raise ConfigError(
            f"a {type(handle).__name__} has no plan. Give the handle that fgoffload.offload(model, memory=...) returns, or an "
            "OffloadCallback(memory=...)."
        )
    return str(handle.explain())
