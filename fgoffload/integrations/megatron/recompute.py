"""Running parts of a layer again in backward, layer by layer, as a plan says.

Where Megatron's modules have an attribute of their own for it, that attribute is set in the layers of the plan; Megatron's
flags set it in all layers alike. A whole layer goes through a checkpoint: Megatron's, which restores the random states of all
its generators, or Transformer Engine's where FP8 is on, which restores the scaling too.

| unit | what does it | since |
|---|---|---|
| `layer` | `tensor_parallel.checkpoint` or `te_checkpoint` around `TransformerLayer.forward` | 0.16.1 |
| `attn_norm` | `TransformerLayer.recompute_input_layernorm` | 0.16.1 |
| `mla_up_proj` | `MLASelfAttention.recompute_up_proj` | 0.16.1 |
| `core_attn` | `SelfAttention.checkpoint_core_attention` | 0.16.1 |
| `mlp_norm` | `TransformerLayer.recompute_pre_mlp_layernorm` | 0.16.1 |
| `mlp` | `TransformerLayer.recompute_mlp` | 0.16.1 |
| `moe` | `MoELayer.moe_layer_recompute` | 0.16.1 |
| `shared_expert` | `MoELayer.shared_experts_recompute` | 0.16.1 |
| `moe_act` | `TEGroupedMLP.activation_recompute` | 0.16.1 |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.layer_inputs import LayerInputs
from fgoffload.integrations.megatron.methods import set_attribute, wrap_method
from fgoffload.integrations.megatron.patches import Patches


@dataclasses.dataclass(frozen=True, slots=True)
class _Switch:
    """How one unit of one layer is made to run again."""

    target: Any
    """The module with the attribute."""
    attribute: str
    prepare_fp8: Callable[[], object] | None = None
    """What else quantized modules need: to keep the original input, whose quantized copy would outlive the recompute."""


def find_units(layer: Any) -> tuple[str, ...]:
    """Return the units of a Megatron layer that can run again by themselves, by the names of `RECOMPUTE_UNITS`."""
    switches = _find_switches(layer)
    if is_quantized(layer.config) and getattr(layer.config, "fp8_recipe", None) == "delayed":
        # They need linears that save their original input, which Transformer Engine refuses with delayed scaling.
        switches = {unit: switch for unit, switch in switches.items() if switch.prepare_fp8 is None}
    return ("layer", *switches)


def switch_on(patches: Patches, inputs: LayerInputs, layer: Any, unit: str) -> None:
    """Let `unit` of `layer` run again in backward, until `patches` are removed.

    Raises:
        IntegrationError: Megatron's own recompute flags are given too.
    """
    granularity = getattr(layer.config, "recompute_granularity", None)
    if granularity is not None:
        raise IntegrationError(
            f"The plan recomputes {unit} in layer {layer.layer_number - 1}, and --recompute-granularity {granularity} "
            "recomputes the same modules in all layers. Leave Megatron's recompute flags out: the plan says all."
        )
    if unit == "layer":
        wrap_method(patches, layer, "forward", lambda original: _run_again(inputs, layer, original))
        return
    switch = _find_switches(layer)[unit]
    set_attribute(patches, switch.target, switch.attribute, True)  # noqa: FBT003 - the value of Megatron's attribute
    if switch.prepare_fp8 is not None and is_quantized(layer.config):
        switch.prepare_fp8()


def is_quantized(config: Any) -> bool:
    """Return whether the linears of a model with this config work in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def _find_switches(layer: Any) -> dict[str, _Switch]:
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    attention, mlp = layer.self_attention, layer.mlp
    switches = {}

    def add(unit: str, target: Any, attribute: str, prepare_fp8: Callable[[], object] | None = None) -> None:
        if hasattr(target, attribute):
            switches[unit] = _Switch(target, attribute, prepare_fp8)

    if not isinstance(layer.input_layernorm, identity):
        add("attn_norm", layer, "recompute_input_layernorm", attention.set_for_recompute_input_layernorm)
    add("mla_up_proj", attention, "recompute_up_proj")
    add("core_attn", attention, "checkpoint_core_attention")
    experts = getattr(mlp, "experts", None)
    if not isinstance(layer.pre_mlp_layernorm, identity):
        prepare = mlp.set_for_recompute_pre_mlp_layernorm if experts is not None else lambda: _save_original(mlp.linear_fc1)
        add("mlp_norm", layer, "recompute_pre_mlp_layernorm", prepare)
    if experts is None:
        # The checkpointed MLP returns its bias, a parameter, and autograd then takes the checkpoint for what computed that
        # parameter: the recompute in backward runs into itself until memory is full. Seen with megatron-core 0.16.1.
        if not layer.config.add_bias_linear:
            add("mlp", layer, "recompute_mlp")
        return switches
    add("moe", mlp, "moe_layer_recompute")
    if getattr(mlp, "shared_experts", None) is not None and not getattr(mlp, "shared_expert_overlap", False):
        add("shared_expert", mlp, "shared_experts_recompute")
    add("moe_act", experts, "activation_recompute", lambda: _save_original(experts.linear_fc2))
    return switches


def _save_original(linear: Any) -> None:
    load_module("megatron.core.extensions.transformer_engine").set_save_original_input(linear)


def _run_again(inputs: LayerInputs, layer: Any, original: Any) -> Any:
    """Return a forward of `layer` that keeps its input alone."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        count = len(args)
        names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        # Reentrant checkpoints reach the parameters through their input: without its gradient they would have none.
        if is_inert() or not any(given[name].requires_grad for name in names):
            return original(*args, **kwargs)

        def run(*tensors: torch.Tensor) -> Any:
            values = given | dict(zip(names, tensors, strict=True))
            return original(*(values.pop(index) for index in range(count)), **values)

        tensors = [given[name] for name in names]
        # The closure lives as long as the checkpoint, and must not hold the input, which is to leave.
        given.update(dict.fromkeys(names))
        with inputs.layers_from(layer.layer_number - 1):
            return _checkpoint(layer, run, tensors)

    return forward


def _checkpoint(layer: Any, run: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    parallel = load_module("megatron.core.tensor_parallel")
    if not is_quantized(layer.config):
        return parallel.checkpoint(run, False, *tensors)  # noqa: FBT003 - Megatron's signature
    # Where its user imports it by name: a block until 0.17, a module of its own since.
    block = load_module("megatron.core.transformer.transformer_block")
    user = load_module("megatron.core.recompute") if hasattr(block, "checkpointed_forward") else block
    return user.te_checkpoint(
        run,
        False,  # noqa: FBT003 - Megatron's signature
        parallel.random.get_cuda_rng_tracker,
        layer.pg_collection.tp,
        *tensors,
    )
