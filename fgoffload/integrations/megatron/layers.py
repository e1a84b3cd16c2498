"""Where forward is in a Megatron model, and what each layer has: sites, units that can run again, and what must be refused."""

import contextlib
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.engine.identity import get_key
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron import recompute
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.layer_inputs import TAG as LAYER_INPUT
from fgoffload.integrations.megatron.layer_inputs import LayerInputs
from fgoffload.integrations.megatron.methods import wrap_symbol
from fgoffload.integrations.megatron.offload import LayerSites
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.regions import GetOffload
from fgoffload.integrations.megatron.sites import add_own_sites, find_fused_tags, find_tags
from fgoffload.integrations.megatron.waits import has_held_wait

LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock"
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"
NEWER_MODELS = ("megatron.core.models.hybrid.hybrid_model:HybridModel",)
NEWER_BLOCKS = ("megatron.core.models.hybrid.hybrid_block:HybridStack",)
NEWER_LAYERS = (
    "megatron.core.transformer.transformer_layer:HyperConnectionTransformerLayer",
    "megatron.core.ssm.mamba_layer:MambaLayer",
)
"""What not all versions have, wrapped where it is there. Each of these layers has a forward of its own."""
CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
SCHEDULE_NODE = "megatron.core.pipeline_parallel.utils:ScheduleNode"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
SCHEDULE_NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def follow_forward(patches: Patches, get_offload: GetOffload) -> None:
    """Wrap what tells where forward is: schedules, models, blocks and layers.

    Args:
        patches: Put everything back later.
        get_offload: Returns what is told; it exists only after everything is wrapped.

    Raises:
        IntegrationError: Megatron-Core lacks one of them.
    """
    for name in SCHEDULE_NAMES:
        wrap_symbol(patches, SCHEDULES, name, functools.partial(_wrap_schedule, get_offload))
    for model in (MODEL, *_list_existing(NEWER_MODELS)):
        wrap_symbol(patches, model, "forward", functools.partial(_wrap_model, get_offload))
    inputs = LayerInputs(patches, get_offload)
    for block in (BLOCK, MTP_BLOCK, *_list_existing(NEWER_BLOCKS)):
        wrap_symbol(patches, block, "forward", functools.partial(_wrap_block, patches, get_offload, inputs))
    for layer in (LAYER, *_list_existing(NEWER_LAYERS)):
        wrap_symbol(patches, layer, "forward", functools.partial(_wrap_layer, get_offload))
    wrap_symbol(patches, CHECKPOINT, "checkpoint", functools.partial(_wrap_checkpoint, get_offload))
    # The overlap of expert communication runs no layer's forward, but the pieces of two microbatches in turns.
    wrap_symbol(patches, MODEL, "build_schedule_plan", functools.partial(_wrap_schedule_plan, patches, get_offload, inputs))
    wrap_symbol(patches, LAYER, "_forward_attention", functools.partial(_wrap_attention, get_offload))
    wrap_symbol(patches, SCHEDULE_NODE, "_forward", functools.partial(_wrap_node, get_offload))


def _list_existing(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        module_name, _, class_name = path.partition(":")
        package_name = module_name.rpartition(".")[0]
        if importlib.util.find_spec(package_name) is None or importlib.util.find_spec(module_name) is None:
            continue
        if hasattr(load_module(module_name), class_name):
            yield path


def _wrap_schedule(get_offload: GetOffload, original: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Where Megatron's own flag is on, its schedule has said so already; ours alone may be on.
        if not kwargs.get("forward_only", False):
            get_offload().finish_open_step()
        return result

    return run


def _wrap_model(get_offload: GetOffload, original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self.config, "fine_grained_activation_offloading", False):
            get_offload().begin_microbatch(getattr(self, "vp_stage", None) or 0)
        return original(self, *args, **kwargs)

    return forward


def _wrap_block(patches: Patches, get_offload: GetOffload, inputs: LayerInputs, original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _register_once(self, patches, get_offload, inputs)
        return original(self, *args, **kwargs)

    return forward


def _wrap_schedule_plan(patches: Patches, get_offload: GetOffload, inputs: LayerInputs, original: Any) -> Any:
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        for block in (self.decoder, getattr(self, "mtp", None)):
            if block is not None:
                _register_once(block, patches, get_offload, inputs)
        if not getattr(self.config, "fine_grained_activation_offloading", False):
            get_offload().begin_microbatch(getattr(self, "vp_stage", None) or 0)
        return original(self, *args, **kwargs)

    return build


def _wrap_attention(get_offload: GetOffload, original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_inert():
            get_offload().pass_layer(get_number(self))
        return original(self, *args, **kwargs)

    return forward


def _wrap_node(get_offload: GetOffload, original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with get_offload().watch():
            return original(self, *args, **kwargs)

    return forward


def _register_once(block: Any, patches: Patches, get_offload: GetOffload, inputs: LayerInputs) -> None:
    if get_offload().is_new(block):
        _check_linears(block)
        _register(block, patches, get_offload, inputs)


def _register(block: Any, patches: Patches, get_offload: GetOffload, inputs: LayerInputs) -> None:
    """Tell what the layers of `block` have, and prepare them for what is planned for each."""
    offload = get_offload()
    # Its own where it knows it: forward need not be in it yet. A hybrid block does not know, and is run by its model.
    chunk = (block.vp_stage or 0) if hasattr(block, "vp_stage") else offload.chunk
    layers = [layer for layer in map(_find_layer, block.layers) if layer is not None]
    offload.register_layers(
        chunk,
        [
            LayerSites(
                number=get_number(layer),
                tags=(*_find_input_tag(block.config, index, offload.selected), *find_tags(layer, offload.selected)),
                fused=find_fused_tags(layer, offload.selected),
                units=recompute.find_units(layer),
            )
            for index, layer in enumerate(layers)
        ],
    )
    for layer in layers:
        number = get_number(layer)
        for unit in offload.list_recomputed(chunk, number):
            recompute.switch_on(patches, inputs, layer, unit)
        add_own_sites(patches, get_offload, layer, offload.list_offloaded(chunk, number))


def _find_input_tag(config: Any, index: int, selected: Sequence[str]) -> tuple[str, ...]:
    """Return `layer_input` where it is selected and Megatron's own full recompute begins at the layer `index` of its block."""
    if LAYER_INPUT not in selected or config.recompute_granularity != "full":
        return ()
    layers = config.recompute_num_layers or 1
    begins = index % layers == 0 if config.recompute_method == "uniform" else index < layers
    return (LAYER_INPUT,) if begins else ()


def _find_layer(module: Any) -> Any:
    """Return the transformer layer that `module` is or, for multi-token prediction, has; None where it is something else."""
    for layer in (module, getattr(module, "transformer_layer", None), getattr(module, "mtp_model_layer", None)):
        if hasattr(layer, "self_attention"):
            return layer
    return None


def get_number(layer: Any) -> int:
    """Return the number of a layer in the whole model, from 0; the layers of multi-token prediction come behind the others."""
    return int(layer.layer_number) - 1


def _wrap_layer(get_offload: GetOffload, original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        offload = get_offload()
        if is_inert():
            # Under a checkpoint, where nothing is saved, and its recompute. The layer counts all the same.
            if not torch.is_grad_enabled():
                offload.pass_layer(get_number(self))
            return original(self, *args, **kwargs)
        lane = offload.enter_layer(get_number(self))
        try:
            with offload.hold() if has_held_wait(self) else contextlib.nullcontext(), offload.engine.watch(lane):
                return original(self, *args, **kwargs)
        except BaseException:
            offload.abandon_microbatch()
            raise

    return forward


def _wrap_checkpoint(get_offload: GetOffload, original: Any) -> Any:
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        tensors: Iterable[Any] = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        # Outputs that are inputs too are not emptied, where there are such (since 0.19).
        kept = {get_key(tensor) for tensor in args if isinstance(tensor, torch.Tensor)} if _retains_inputs(self) else set()
        # Before anything can save them: Megatron empties these storages after their last use in forward.
        get_offload().engine.keep_recomputed(
            tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and get_key(tensor) not in kept
        )
        return outputs

    return checkpoint


def _retains_inputs(checkpoint: Any) -> bool:
    return bool(getattr(checkpoint, "retain_input_tensors", False))


def _check_linears(block: Any) -> None:
    """Refuse linears that find out through an attribute of their saved weight that its gradient is in place already.

    Raises:
        IntegrationError: A linear of Megatron's own in `block` fuses the accumulation of its weight's gradient. Under any
            saved-tensor hooks torch gives a custom function a new tensor for a saved parameter, without its attributes, so
            `grad_added_to_main_grad` would be lost, and the gradient with it. Source: `SavedVariable::unpack` of torch 2.13,
            `LinearWithGradAccumulationAndAsyncCommunication.backward` of megatron-core 0.16.1.
    """
    linears = load_module("megatron.core.tensor_parallel.layers")
    for name, module in block.named_modules():
        is_own = type(module) in (linears.ColumnParallelLinear, linears.RowParallelLinear)
        if is_own and getattr(module, "gradient_accumulation_fusion", False):
            raise IntegrationError(
                f"gradient_accumulation_fusion is on in {name} ({type(module).__name__}), and activation offload cannot work "
                "with it there. Give --no-gradient-accumulation-fusion, or Transformer Engine's layers."
            )
