"""Derives a prediction's assumptions (optimizer state, fused kernels, offload settings) from Megatron's flags."""

import logging
from collections.abc import Mapping
from typing import Any

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.graphs.graph_checks import read_graphs
from fgoffload.planner.memory.static_memory import ParameterState
from fgoffload.planner.model_ranks import Assumptions
from fgoffload.planner.operations.ops import Execution
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import parse_bytes

logger = logging.getLogger(__name__)

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes per element, keyed by the dtype names in Megatron's flags."""

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Sharding strategies of Megatron-FSDP. Each strategy shards more than the previous one."""

_PRECISION_AWARE_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def make_assumptions(values: Mapping[str, Any], *, has_optimizer: bool) -> Assumptions:
    """Build the planner's assumptions from Megatron's flags. If `has_optimizer` is False, steps do not update parameters.

    The keys of `values` are flag names with `_` instead of `-`. Absent flags have no entry. Raise a ConfigError if a flag is
    invalid or two flags are mutually exclusive.
    """
    elements = values.get("min_offloaded_tensor_size", DEFAULT_MIN_OFFLOADED_TENSOR_SIZE)
    if elements < 0:
        raise ConfigError(f"--min-offloaded-tensor-size {elements} is below 0. Pass a number of elements, for example 1048576.")
    sizes = {
        f"{name}_bytes": parse_bytes(values[f"offload_{name}"], name=f"--offload-{name}", needs_unit=True)
        for name in ("window", "prefetch")
        if f"offload_{name}" in values
    }
    return Assumptions(
        state=make_parameter_state(values, has_optimizer=has_optimizer),
        policy=TransferPolicy(**sizes),
        min_offloaded_numel=elements,
        execution=Execution(
            has_fused_dropout_add=values.get("bias_dropout_fusion", True),
            has_fused_gradient_accumulation=values.get("gradient_accumulation_fusion", True),
        ),
        graphs=read_graphs(values),
    )


def make_parameter_state(values: Mapping[str, Any], *, has_optimizer: bool) -> ParameterState:
    """Return the bytes per parameter for gradients and optimizer states. Without an optimizer, only gradients are counted.

    Sources: `validate_args` in megatron/training/arguments.py, core/optimizer/optimizer_config.py and
    core/optimizer/distrib_optimizer.py in Megatron-LM core 0.16.1.

    Raises:
        ConfigError: A dtype needs the precision-aware optimizer, which is off, or two flags are mutually exclusive.
    """
    is_aware = values.get("use_precision_aware_optimizer", False)
    types = {name: values.get(name, "fp32") for name in _PRECISION_AWARE_TYPES}
    for name, dtype in types.items():
        if dtype != "fp32" and not is_aware:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {dtype} needs --use-precision-aware-optimizer. Add it, or pass {flag} fp32.")
    gradient_bytes = _count_gradient_bytes(values, types["main_grads_dtype"])
    shared = _find_shared(values)
    if not has_optimizer:
        return ParameterState(gradient_bytes=gradient_bytes, main_parameter_bytes=0, moment_bytes=0, **shared)
    fraction = values.get("optimizer_offload_fraction", 1.0) if values.get("optimizer_cpu_offload") else 0.0
    if fraction:
        logger.warning(
            "--optimizer-cpu-offload: the CPU update and its copies are not modeled, so predicted times are too short. The "
            "host budget does not include the optimizer's host memory."
        )
    if (name := values.get("optimizer", "adam")) != "adam":
        logger.warning("--optimizer %s: the sizes of its states are unknown, so a plan assumes those of Adam.", name)
    return ParameterState(
        gradient_bytes=gradient_bytes,
        main_parameter_bytes=_count_main_parameter_bytes(values, types["main_params_dtype"]),
        moment_bytes=DTYPE_BYTES[types["exp_avg_dtype"]] + DTYPE_BYTES[types["exp_avg_sq_dtype"]],
        offloaded_part=fraction,
        **shared,
    )


def _find_shared(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fields of `ParameterState` that do not depend on the optimizer: FP8 weights and sharding."""
    strategy = values.get("data_parallel_sharding_strategy", "no_shard") if values.get("use_megatron_fsdp") else "no_shard"
    if values.get("use_torch_fsdp2"):
        strategy = "optim_grads_params"
    if strategy == "optim_grads_params":
        logger.warning(
            "FSDP: a plan assumes that compute hides weight all-gathers, so predicted times are too short on a slow network."
        )
    return {
        "has_fp8_weights": values.get("fp8_param_gather", False),
        "shards_gradients": strategy in ("optim_grads", "optim_grads_params"),
        "shards_weights": strategy == "optim_grads_params",
    }


def _count_gradient_bytes(values: Mapping[str, Any], main_dtype: str) -> int:
    accumulates = values.get("accumulate_allreduce_grads_in_fp32", False)
    if accumulates and main_dtype != "fp32":
        raise ConfigError(
            f"--main-grads-dtype {main_dtype} and --accumulate-allreduce-grads-in-fp32 are mutually exclusive. Use one of them."
        )
    if values.get("bf16"):
        return DTYPE_BYTES["bf16" if values.get("grad_reduce_in_bf16") else main_dtype]
    return DTYPE_BYTES["fp16" if values.get("fp16") and not accumulates else "fp32"]


def _count_main_parameter_bytes(values: Mapping[str, Any], dtype: str) -> int:
    if not values.get("bf16") and not values.get("fp16"):
        return 0  # the optimizer updates the model's own parameters
    # With bf16, Transformer Engine stores only the low 16 bits of main parameters, except with non-`delayed` FP8 recipes.
    has_remainders = values.get("bf16") and values.get("fp8_recipe", "delayed") == "delayed"
    if values.get("use_precision_aware_optimizer") and has_remainders:
        return DTYPE_BYTES["fp16"]
    return DTYPE_BYTES[dtype]
