"""Megatron-Core's own offload engine, for comparison with ours.

The engine keeps its state in one object for the whole process, and needs a switch that Transformer Engine reads at import. So
its process starts with `NVTE_CPU_OFFLOAD_V1=1` and does not run our engine.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError, IntegrationError
from fgoffload.integrations.megatron.adapter.model_config import CONFIG_MODULE, list_accepted
from fgoffload.integrations.megatron.interface import get_version, is_replaced
from fgoffload.integrations.megatron.patching.cpu_support import has_transformer_engine, needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import CPU_OFFLOAD_V1, load_module

_INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def prepare(offload: OffloadConfig) -> None:
    """Check that Megatron's engine supports `offload` here, and reset it. Call this before the model is built.

    Raises:
        ConfigError: The engine does not support an option of `offload`.
        IntegrationError: The engine cannot run in this process.
    """
    _check_process()
    if offload.offload_plan is not None:
        raise ConfigError(
            f"--offload-plan {offload.offload_plan}: Megatron-Core's own engine reads no plans. Name the modules."
        )
    if offload.delay_offload_until_cuda_graph and not _has_field("delay_offload_until_cuda_graph"):
        raise ConfigError(
            f"--delay-offload-until-cuda-graph: the engine of megatron-core {get_version()} does not delay. "
            "Leave it out, or install 0.19 or newer."
        )
    accepted = list_accepted(offload.offload_modules)
    if missing := [tag for tag in offload.offload_modules if tag not in accepted]:
        raise ConfigError(
            f"--offload-modules {missing[0]!r} is none of Megatron-Core's own modules. Give some of its own, as in core_attn."
        )
    reset()


def reset() -> None:
    """Reset Megatron's engine, including its host memory, since another model has other groups."""
    load_module(_INTERFACE).FineGrainedActivationOffloadingInterface.reset_instance()


def choose_fraction(config: Any, fraction: float) -> None:
    """Make Megatron's engine offload a fraction of its groups.

    Args:
        config: Megatron's TransformerConfig, before a model is built with it.
        fraction: The fraction, from 0 to 1.

    Raises:
        ConfigError: This version of Megatron-Core has no fraction.
    """
    if hasattr(config, "activation_offload_fraction"):
        config.activation_offload_fraction = fraction
    elif fraction != 1.0:
        version = get_version()
        raise ConfigError(
            f"--activation-offload-fraction {fraction}: the engine of megatron-core {version} has no fraction. "
            "Give 1, or install one that has it."
        )


def _has_field(name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(load_module(CONFIG_MODULE).TransformerConfig))


def _check_process() -> None:
    for fault in _find_faults():
        raise IntegrationError(f"Megatron-Core's own offload engine {fault}.")


def _find_faults() -> Iterator[str]:
    if needs_cpu_support():
        yield "needs a GPU, and there is none. Run it on one"
    if not has_transformer_engine():
        yield "needs Transformer Engine, which cannot be imported here. Install it: pip install 'fgoffload[te]'"
    if is_replaced():
        yield "is replaced in this process by ours. Call `remove` on what `apply` returned first"
    # Transformer Engine before 2.10 neither has nor needs this switch.
    if not getattr(load_module("transformer_engine.pytorch.cpu_offload"), CPU_OFFLOAD_V1, True):
        yield f"needs {CPU_OFFLOAD_V1}=1 before Transformer Engine is imported. Set it when the process starts"
