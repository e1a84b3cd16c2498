"""Runs Megatron-Core's own offload engine, for comparison with ours.

Megatron's engine needs a separate process, because Transformer Engine reads `NVTE_CPU_OFFLOAD_V1=1` only at import.
"""

from collections.abc import Iterator
from typing import Any

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError, IntegrationError
from fgoffload.integrations.megatron.adapter.model_config import list_accepted
from fgoffload.integrations.megatron.interface import get_version, is_replaced
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import CPU_OFFLOAD_V1, load_module

_INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def prepare(offload: OffloadConfig, config: Any) -> None:
    """Check that Megatron's engine supports `offload`, and reset the engine. Call this before the model is built.

    This also sets the fraction to offload in Megatron's `config`.

    Raises:
        ConfigError: The engine does not support an option of `offload`.
        IntegrationError: The engine cannot run in this process.
    """
    for fault in _list_faults():
        raise IntegrationError(f"Megatron-Core's own offload engine {fault}.")
    fraction, name = offload.activation_offload_fraction, f"The engine of megatron-core {get_version()}"
    if offload.delay_offload_until_cuda_graph and not hasattr(config, "delay_offload_until_cuda_graph"):
        raise ConfigError(f"{name} does not support --delay-offload-until-cuda-graph. Remove it, or install 0.19 or newer.")
    if fraction != 1.0 and not hasattr(config, "activation_offload_fraction"):
        raise ConfigError(f"{name} does not support --activation-offload-fraction {fraction}. Use 1, or install 0.19 or newer.")
    accepted = list_accepted(offload.offload_modules)
    if missing := [tag for tag in offload.offload_modules if tag not in accepted]:
        raise ConfigError(
            f"Megatron-Core's engine does not support --offload-modules {missing[0]}. Use another module, such as core_attn."
        )
    config.activation_offload_fraction = fraction
    reset()


def reset() -> None:
    """Reset Megatron's engine and free its host memory."""
    load_module(_INTERFACE).FineGrainedActivationOffloadingInterface.reset_instance()


def _list_faults() -> Iterator[str]:
    if needs_cpu_support():
        yield "needs a GPU, but this machine has none. Run it on a machine with a GPU"
    if not has_transformer_engine():
        yield "needs Transformer Engine, which cannot be imported here. Install it: pip install 'fgoffload[te]'"
    if is_replaced():
        yield "is replaced by fgoffload in this process. Call `remove` on the object that `apply` returned"
    # Transformer Engine before 2.10 neither has nor needs this switch.
    if not getattr(load_module("transformer_engine.pytorch.cpu_offload"), CPU_OFFLOAD_V1, True):
        yield f"needs {CPU_OFFLOAD_V1}=1 before Transformer Engine is imported. Set it when the process starts"
