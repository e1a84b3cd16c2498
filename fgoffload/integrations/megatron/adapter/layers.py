"""Tracks the layer that forward has reached in a Megatron model, and prepares the sites and recompute units of each layer."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number, list_layers
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.integrations.megatron.adapter.model_config import list_accepted, read_facts
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.adapter.regions import GetOffload, find_tensor
from fgoffload.integrations.megatron.adapter.site_actions import LayerSites
from fgoffload.integrations.megatron.adapter.sites import (
    add_own_sites,
    find_fused_tags,
    find_tags,
    shares_router_input,
    switch_off_later,
)
from fgoffload.integrations.megatron.flags.tag_checks import check_paged_stash, check_selective
from fgoffload.integrations.megatron.graphs.graph_checks import check_graphs, check_recompute
from fgoffload.integrations.megatron.graphs.graphed_layers import LAYER, follow_graphs, is_capturing
from fgoffload.integrations.megatron.host_waits.waits import has_held_wait, has_wait
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol
from fgoffload.integrations.megatron.recompute import layer_recompute
from fgoffload.integrations.megatron.recompute.layer_inputs import TAG as LAYER_INPUT
from fgoffload.integrations.megatron.recompute.layer_inputs import LayerInputs
from fgoffload.plan import naming_plan_file

BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock"
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"
NEWER_MODELS = ("megatron.core.models.hybrid.hybrid_model:HybridModel",)
NEWER_BLOCKS = ("megatron.core.models.hybrid.hybrid_block:HybridStack",)
NEWER_LAYERS = (
    "megatron.core.transformer.transformer_layer:HyperConnectionTransformerLayer",
    "megatron.core.ssm.mamba_layer:MambaLayer",
)
"""Other layer classes with a `forward` of their own. Not every version of Megatron-Core has all of them."""
SCHEDULE_NODE = "megatron.core.pipeline_parallel.utils:ScheduleNode"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
SCHEDULE_NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def wrap_forward(patches: Patches, get_offload: GetOffload) -> None:
    """Wrap schedules, models, blocks and layers, to report the progress of forward to the integration."""
    for name in SCHEDULE_NAMES:
        wrap_symbol(patches, SCHEDULES, name, functools.partial(_run_schedule, get_offload))
    registrar = _Registrar(patches, get_offload, LayerInputs(patches, get_offload))
    for model in (MODEL, *_list_existing(NEWER_MODELS)):
        wrap_symbol(patches, model, "forward", functools.partial(_run_model, registrar))
    for block in (BLOCK, MTP_BLOCK, *_list_existing(NEWER_BLOCKS)):
        wrap_symbol(patches, block, "forward", functools.partial(_run_block, registrar))
    for layer in (LAYER, *_list_existing(NEWER_LAYERS)):
        wrap_symbol(patches, layer, "forward", functools.partial(_run_layer, get_offload))
    # Overlapped expert communication does not call a layer's forward. It interleaves parts of the layers of two microbatches.
    wrap_symbol(patches, MODEL, "build_schedule_plan", functools.partial(_run_model, registrar))
    wrap_symbol(patches, LAYER, "_forward_attention", functools.partial(_run_attention, get_offload))
    wrap_symbol(patches, SCHEDULE_NODE, "_forward", functools.partial(_run_node, get_offload))
    follow_graphs(patches, get_offload, functools.partial(_run_layer, get_offload))


def _list_existing(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        with contextlib.suppress(IntegrationError):
            require_symbol(path, "forward")
            yield path


def _run_schedule(get_offload: GetOffload, original: Any, *args: Any, **kwargs: Any) -> Any:
    is_training = not kwargs.get("forward_only", False)
    if is_training:
        get_offload().begin_step(ScheduleCall.read(kwargs))
    result = original(*args, **kwargs)
    # Megatron's schedule has already finished the step if Megatron's own offload flag is on.
    if is_training:
        get_offload().finish_open_step()
    return result


def _run_model(registrar: "_Registrar", original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    registrar.begin_forward(model)
    offload = registrar.get_offload()
    with offload.watch_model(model, getattr(model, "vp_stage", None) or 0):
        outputs = original(model, *args, **kwargs)
    offload.flush_delayed()  # this forward launches no more CUDA graphs
    return outputs


def _run_block(registrar: "_Registrar", original: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
    # Prefer the block's own chunk: if the block runs without a model, nothing has set `offload.chunk`.
    offload, chunk = registrar.get_offload(), getattr(block, "vp_stage", None)
    chunk = offload.chunk if chunk is None else chunk
    registrar.register([block], chunk)
    offload.enter_block(block, chunk)
    outputs = original(block, *args, **kwargs)
    offload.leave_block(block)
    return outputs


def _find_ending_block(model: Any) -> Any:
    """Return the last block of `model` before the loss, or None if other pipeline stages follow."""
    if not getattr(model, "post_process", False):
        return None
    multi_token = getattr(model, "mtp", None)  # an MTP block runs after the decoder
    return model.decoder if multi_token is None else multi_token


def _run_attention(get_offload: GetOffload, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    offload = get_offload()
    if offload.is_idle or is_inert():
        return original(layer, *args, **kwargs)
    offload.layer = get_number(layer)
    with offload.watch_attention():
        outputs = original(layer, *args, **kwargs)
    hidden = outputs[0] if isinstance(outputs, tuple) else outputs
    if isinstance(hidden, torch.Tensor):
        offload.leave_attention(hidden)
    return outputs


def _run_node(get_offload: GetOffload, original: Any, *args: Any, **kwargs: Any) -> Any:
    with get_offload().watch():
        return original(*args, **kwargs)


class _Registrar:
    """Registers each model's layers with the integration once, and prepares them for their planned actions."""

    def __init__(self, patches: Patches, get_offload: GetOffload, inputs: LayerInputs) -> None:
        self._patches = patches
        self._innermost = Patches()
        """Wrappers that must run inside the regions of sites. They are applied first."""
        patches.enter_context(self._innermost)
        self.get_offload = get_offload
        self._inputs = inputs

    def begin_forward(self, model: Any) -> None:
        """Register the blocks of a model chunk, and begin a microbatch. Called before forward or `build_schedule_plan`."""
        offload, chunk = self.get_offload(), getattr(model, "vp_stage", None) or 0
        ending = _find_ending_block(model)
        offload.ending_block = None if ending is None else weakref.ref(ending)
        # Register all blocks of the chunk together, because the offloaded fraction applies to the sites of the whole chunk.
        self.register([block for block in (model.decoder, getattr(model, "mtp", None)) if block is not None], chunk)
        if not getattr(model.config, "fine_grained_activation_offloading", False):
            most_in_flight = getattr(model.config, "fine_grained_offloading_max_inflight_offloads", None)
            offload.begin_microbatch(chunk, most_in_flight=most_in_flight)

    def register(self, blocks: Iterable[Any], chunk: int) -> None:
        """Check the configs of new blocks and the plan, then register and prepare the layers."""
        offload = self.get_offload()
        new = [block for block in blocks if block not in offload.blocks]
        if not new:
            return
        for block in new:
            _check_linears(block)
            _check_config(block.config, offload)
        found = [
            (layer, _find_input_tag(stack, index, offload.selected))
            for block in new
            for stack, index, layer in list_layers(block)
        ]
        with naming_plan_file(offload.config.offload_plan):
            offload.actions.register_layers(chunk, [_describe(layer, tag, offload.selected) for layer, tag in found])
        offload.has_waiting_layers |= any(has_wait(layer) for layer, _ in found)
        for layer, _ in found:
            self._prepare(layer, chunk)
        # Added last: if a check above raises, the next forward must check the block again.
        offload.blocks.update([*new, *(stack for block in new for stack, _, _ in list_layers(block))])

    def _prepare(self, layer: Any, chunk: int) -> None:
        offload, number = self.get_offload(), get_number(layer)
        offload.graphs.chunks[layer] = chunk
        recomputed = offload.actions.list_recomputed(chunk, number)
        check_recompute(recomputed, vars(layer.config), layer=number, is_moe=getattr(layer, "is_moe_layer", False))
        # If the run measures a step first, its plan is made afterwards and may recompute any unit.
        units = recomputed if offload.measurement is None else layer_recompute.find_units(layer)
        layer_recompute.wrap_consumers(self._innermost, self.get_offload, layer, units)
        for unit in recomputed:
            layer_recompute.switch_on(self._patches, self._inputs, layer, unit)
        actions = offload.actions
        sited = actions.list_offloaded(chunk, number) if offload.measurement is None else actions.list_tags(chunk, number)
        # The recompute of `mlp_fc1` opens that site itself, around its input only.
        own = tuple(tag for tag in sited if tag != "mlp_fc1" or tag not in recomputed)
        add_own_sites(self._patches, self.get_offload, layer, own)
        switch_off_later(self._patches, layer)
        if offload.measurement is not None:
            offload.measurement.prepare_layer(layer, chunk, self._inputs)


def _describe(layer: Any, input_tag: tuple[str, ...], selected: Sequence[str]) -> LayerSites:
    return LayerSites(
        number=get_number(layer),
        tags=(*input_tag, *find_tags(layer, selected)),
        fused=find_fused_tags(layer, selected),
        units=layer_recompute.find_units(layer),
        shares_router_input=shares_router_input(layer),
    )


def _find_input_tag(stack: Any, index: int, selected: Sequence[str]) -> tuple[str, ...]:
    """Return `layer_input` if this tag is selected and a checkpoint of Megatron's full recompute begins at this layer."""
    config = stack.config
    if LAYER_INPUT not in selected or config.recompute_granularity != "full":
        return ()
    layers = config.recompute_num_layers or 1
    if config.recompute_method == "uniform":
        # In an MTP depth, one checkpoint covers all layers.
        begins = index == 0 if getattr(stack, "is_mtp_layer", False) else index % layers == 0
    else:
        begins = index < layers and hasattr(stack, "pre_process")  # MTP blocks are stacks without `pre_process`
    return (LAYER_INPUT,) if begins else ()


def _run_layer(get_offload: GetOffload, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    offload = get_offload()
    if is_capturing():
        return original(layer, *args, **kwargs)
    if is_inert():
        # With grad mode disabled, this is the forward of a checkpoint. With grad mode enabled, it is a recompute.
        if not torch.is_grad_enabled():
            offload.layer = get_number(layer)
        return original(layer, *args, **kwargs)
    lane = offload.enter_layer(get_number(layer))
    if offload.is_idle:
        return original(layer, *args, **kwargs)
    hidden = find_tensor(args, kwargs)
    try:
        watched = offload.watch_layer(lane, hidden, has_parts=hasattr(layer, "_forward_attention"))
        with offload.holding if has_held_wait(layer) else contextlib.nullcontext(), watched:
            return original(layer, *args, **kwargs)
    except BaseException:
        offload.abandon_microbatch()
        raise


def _check_config(config: Any, offload: MegatronOffload) -> None:
    if getattr(config, "cpu_offloading", False):
        raise IntegrationError(
            "--cpu-offloading-num-layers and activation offload would move the same tensors. Remove one of them."
        )
    if offload.actions.plan is not None:
        with naming_plan_file(offload.config.offload_plan):
            offload.actions.plan.check_made_for(read_facts(config))
    granularity = getattr(config, "recompute_granularity", None)
    if granularity is not None and (offload.measurement is not None or offload.actions.recomputes):
        source = "The plan" if offload.measurement is None else "--offload-modules auto"
        raise IntegrationError(
            f"{source} chooses recompute layer by layer, but --recompute-granularity {granularity} applies to all "
            "layers. Remove Megatron's recompute flags."
        )
    is_overlapped = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if is_overlapped and offload.measurement is not None:
        raise IntegrationError(
            "--overlap-moe-expert-parallel-comm interleaves two microbatches, but --offload-modules auto measures one layer at "
            "a time. Remove the first flag, or pass tags or a plan instead of auto."
        )
    if is_overlapped and offload.actions.recomputes:
        raise IntegrationError(
            "--overlap-moe-expert-parallel-comm runs parts of layers separately, so a plan cannot recompute modules. "
            "Remove the flag, or use a plan without recompute."
        )
    # Our commands run these checks before Megatron starts. Code that calls `apply` directly has no earlier check.
    check_selective(offload.config, vars(config))
    check_paged_stash(offload.selected, vars(config))
    check_graphs(offload.config, offload.selected, vars(config))
    if list_accepted(offload.selected) and not getattr(config, "fine_grained_activation_offloading", False):
        raise IntegrationError(
            "The model's TransformerConfig was created before activation offload was applied, so Megatron's own call sites are "
            "off. Call `apply` first, or set fine_grained_activation_offloading and offload_modules in the config."
        )


def _check_linears(block: Any) -> None:
    """Reject Megatron's own linears with gradient accumulation fusion, because their gradients would be lost.

    Under saved-tensor hooks, torch unpacks a saved weight as a new tensor without the weight's attributes, such as
    `grad_added_to_main_grad`. Source: `SavedVariable::unpack` of torch 2.13,
    `LinearWithGradAccumulationAndAsyncCommunication.backward` of megatron-core 0.16.1.
    """
    linears = load_module("megatron.core.tensor_parallel.layers")
    for name, module in block.named_modules():
        is_own = type(module) in (linears.ColumnParallelLinear, linears.RowParallelLinear)
        if is_own and getattr(module, "gradient_accumulation_fusion", False):
            raise IntegrationError(
                f"gradient_accumulation_fusion is on in {name} ({type(module).__name__}), but activation offload does not "
                "support it there. Pass --no-gradient-accumulation-fusion, or use Transformer Engine's layers."
            )
