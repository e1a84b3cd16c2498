"""Recomputes the planned units of each layer in backward.

If a Megatron module has an attribute that enables its recompute, we set it in the planned layers, and `checkpoints.py` replaces
the module's `CheckpointWithoutOutput`. Whole layers use Megatron's checkpoint or, with FP8, Transformer Engine's, which also
restores the scaling. `partial_recompute.py` recomputes a module's first linear, and `permutations.py` token permutations.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fgoffload.engine import is_inert
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.regions import GetOffload, find_tensor
from fgoffload.integrations.megatron.adapter.sites import is_quantized, save_whole_input
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import set_attribute, wrap_method
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute import partial_recompute, permutations
from fgoffload.integrations.megatron.recompute.detached_outputs import DetachedOutputs
from fgoffload.integrations.megatron.recompute.layer_inputs import BLOCK_MODULE, RECOMPUTE_MODULE, LayerInputs


class _Switch(NamedTuple):
    """Attribute that enables recompute of one unit of a layer."""

    target: Any
    """Module with the attribute."""
    attribute: str
    prepare_fp8: Callable[[], object] | None = None
    """Makes quantized modules save their original input, because a quantized copy would stay on the GPU."""


def find_units(layer: Any) -> tuple[str, ...]:
    """Return the names of the units in `RECOMPUTE_UNITS` that a Megatron layer can recompute."""
    switches = _find_switches(layer)
    if is_quantized(layer.config) and getattr(layer.config, "fp8_recipe", None) == "delayed":
        # Transformer Engine's linears cannot save their original input with delayed scaling.
        switches = {unit: switch for unit, switch in switches.items() if switch.prepare_fp8 is None}
    permutation = (permutations.UNIT,) if permutations.can_recompute_permutation(layer) else ()
    return ("layer", *switches, *partial_recompute.find_partial_recomputes(layer), *permutation)


def switch_on(patches: Patches, inputs: LayerInputs, layer: Any, unit: str) -> None:
    """Recompute `unit` of `layer` in backward, until `patches` are removed."""
    if unit == "layer":
        wrap_method(patches, layer, "forward", functools.partial(_run_checkpointed, inputs))
        return
    part = partial_recompute.find_partial_recomputes(layer).get(unit)
    if part is not None:
        partial_recompute.recompute_part(patches, inputs.get_offload, part)
        return
    if unit == permutations.UNIT:
        permutations.recompute_permutation(patches, layer, lambda: inputs.get_offload().open_reruns)
        return
    switch = _find_switches(layer)[unit]
    set_attribute(patches, switch.target, switch.attribute, True)  # noqa: FBT003 - the value of Megatron's attribute
    wrap_method(patches, layer, "forward", _recompute_if_input_has_grad)
    if is_quantized(layer.config):
        if switch.prepare_fp8 is not None:
            switch.prepare_fp8()
    elif unit == "moe_act":
        save_whole_input(patches, getattr(layer.mlp.experts, "linear_fc2", None))  # one placeholder, not one per expert


def wrap_consumers(patches: Patches, get_offload: GetOffload, layer: Any, units: Iterable[str]) -> None:
    """Wrap the methods that save outputs of `CheckpointWithoutOutput`, so that they save placeholders instead.

    Call this before you add any other wrapper to the layer, so that the hooks run inside the engine's regions.
    """
    for unit in units:
        for module, name in _list_consumers(layer, unit):
            if callable(getattr(module, name, None)):
                place = Place(None, f"{type(module).__name__}.{name} of layer {get_number(layer)}")
                wrap_method(patches, module, name, functools.partial(_run_consumer, get_offload, place))


def _list_consumers(layer: Any, unit: str) -> Iterator[tuple[Any, str]]:
    """Yield the module and name of each method that saves the output of `unit` and opens no region itself."""
    attention, mlp = layer.self_attention, layer.mlp
    if unit == "attn_norm":
        yield from ((getattr(attention, name, None), "forward") for name in _ATTENTION_INPUTS)
    elif unit == "mla_up_proj":
        yield getattr(attention, "core_attention", None), "forward"
    elif unit == "moe_act":
        yield getattr(mlp.experts, "linear_fc2", None), "forward"
    elif unit == "mlp_norm":
        shared = getattr(mlp, "shared_experts", None)
        for module in (mlp, shared):
            yield getattr(module, "linear_fc1", None), "forward"
        yield getattr(mlp, "fc1_latent_proj", None), "forward"
        yield getattr(mlp, "router", None), "gating"
        if getattr(shared, "use_shared_expert_gate", False) and not getattr(mlp, "shared_expert_overlap", False):
            yield shared, "forward"


_ATTENTION_INPUTS = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")
"""Attributes that hold the first linears of Megatron's attention modules."""


def _run_consumer(get_offload: GetOffload, place: Place, original: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = get_offload().open_reruns.find_outputs()
    with DetachedOutputs(outputs, place) if outputs else contextlib.nullcontext():
        return original(*args, **kwargs)


def _find_switches(layer: Any) -> dict[str, _Switch]:
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    attention, mlp = layer.self_attention, layer.mlp
    switches = {}

    def add(unit: str, target: Any, attribute: str, prepare_fp8: Callable[[], object] | None = None) -> None:
        if hasattr(target, attribute):
            switches[unit] = _Switch(target, attribute, prepare_fp8)

    if not isinstance(layer.input_layernorm, identity):
        # Attention modules that are not Megatron's `Attention` lack this method, which is needed only with FP8.
        prepare_attention = getattr(attention, "set_for_recompute_input_layernorm", None)
        if prepare_attention is not None or not is_quantized(layer.config):
            add("attn_norm", layer, "recompute_input_layernorm", prepare_attention)
    add("mla_up_proj", attention, "recompute_up_proj")
    add("core_attn", attention, "checkpoint_core_attention")
    experts = getattr(mlp, "experts", None)
    if not isinstance(layer.pre_mlp_layernorm, identity):
        add("mlp_norm", layer, "recompute_pre_mlp_layernorm", lambda: _prepare_mlp(mlp))
    if experts is None:
        # The checkpointed MLP returns its bias, and autograd treats the checkpoint as the function that computed the bias. Then
        # the recompute in backward calls itself until memory runs out. Seen with megatron-core 0.16.1.
        if not layer.config.add_bias_linear:
            add("mlp", layer, "recompute_mlp")
        return switches
    add("moe", mlp, "moe_layer_recompute")
    if getattr(mlp, "shared_experts", None) is not None and not getattr(mlp, "shared_expert_overlap", False):
        add("shared_expert", mlp, "shared_experts_recompute")
    add("moe_act", experts, "activation_recompute", lambda: _save_original(experts.linear_fc2))
    return switches


def _prepare_mlp(mlp: Any) -> None:
    if hasattr(mlp, "set_for_recompute_pre_mlp_layernorm"):
        mlp.set_for_recompute_pre_mlp_layernorm()
    else:
        _save_original(mlp.linear_fc1)


def _save_original(linear: Any) -> None:
    load_module("megatron.core.extensions.transformer_engine").set_save_original_input(linear)


def _recompute_if_input_has_grad(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the layer's forward, without recompute if the layer's input needs no gradient, for example after frozen layers.

    Megatron's checkpoints are reentrant: if their input needs no gradient, the parameters silently get no gradients.
    """
    if not torch.is_grad_enabled() or find_tensor(args, kwargs).requires_grad:
        return original(layer, *args, **kwargs)
    with contextlib.ExitStack() as restored:
        for target, attribute, _ in _find_switches(layer).values():
            restored.callback(setattr, target, attribute, getattr(target, attribute))
            setattr(target, attribute, False)
        return original(layer, *args, **kwargs)


def _run_checkpointed(inputs: LayerInputs, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    given = partial_recompute.collect_arguments(args, kwargs)
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    # See `_recompute_if_input_has_grad`.
    if is_inert() or not any(tensor.requires_grad for tensor in tensors.values()):
        return original(layer, *args, **kwargs)
    # The closure lives as long as the checkpoint. It must not hold the input, which may be offloaded.
    kept, keys = given | dict.fromkeys(tensors), tuple(tensors)

    def run(*tensors: torch.Tensor) -> Any:
        return partial_recompute.call_with(original, layer, kept | dict(zip(keys, tensors, strict=True)))

    with inputs.layers_from(get_number(layer)):
        return _checkpoint(layer, run, list(tensors.values()))


def _checkpoint(layer: Any, run: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    parallel = load_module("megatron.core.tensor_parallel")
    if not is_quantized(layer.config):
        return parallel.checkpoint(run, False, *tensors)  # noqa: FBT003 - Megatron's signature
    block = load_module(BLOCK_MODULE)
    user = load_module(RECOMPUTE_MODULE) if hasattr(block, "checkpointed_forward") else block  # since 0.18
    return user.te_checkpoint(
        run,
        False,  # noqa: FBT003 - Megatron's signature
        parallel.random.get_cuda_rng_tracker,
        layer.pg_collection.tp,
        *tensors,
    )
