"""Sites of our own, where Megatron-Core has none, and what the engine has to know of Megatron's layers.

| what | class and method | since |
|---|---|---|
| the layer that forward is in, watched | `TransformerLayer.forward` | 0.16.1 |
| the sites of a model chunk | `TransformerBlock.forward` | 0.16.1 |
| `expert_fc1` of sequential experts: the permuted tokens | `SequentialMLP.forward`, each expert's `linear_fc1` | 0.16.1 |
| `moe_act` of sequential experts: what lies between the linears | each expert's `linear_fc1` and `linear_fc2` | 0.16.1 |
| storages that a recompute empties and refills | `CheckpointWithoutOutput.checkpoint` | 0.16.1 |
| refused: the overlap of expert communication, which runs layers in pieces | `GPTModel.build_schedule_plan` | 0.16.1 |

The grouped experts of Transformer Engine and all of attention have call sites of Megatron's own: `interface.py`.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from fgoffload.engine import Region, Saving
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.offload import MegatronOffload
from fgoffload.integrations.megatron.patches import Patches, require_symbol

LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
EXPERTS = "megatron.core.transformer.moe.experts:SequentialMLP"
CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"

GetOffload = Callable[[], MegatronOffload]


def add_sites(patches: Patches, get_offload: GetOffload) -> None:
    """Wrap the methods of the table above.

    Args:
        patches: Puts them back later.
        get_offload: Returns what answers the calls; it exists only after everything is wrapped.

    Raises:
        IntegrationError: Megatron-Core lacks one of them.
    """
    _wrap(patches, BLOCK, "forward", functools.partial(_wrap_block, get_offload))
    _wrap(patches, LAYER, "forward", functools.partial(_wrap_layer, get_offload))
    _wrap(patches, EXPERTS, "forward", functools.partial(_wrap_experts, get_offload, patches))
    _wrap(patches, CHECKPOINT, "checkpoint", functools.partial(_wrap_checkpoint, get_offload))
    _wrap(patches, MODEL, "build_schedule_plan", lambda original: _refuse_overlap)


def find_tags(layer: Any, selected: tuple[str, ...]) -> list[str]:
    """Return those of the tags `selected` that have a site in a Megatron layer, in the order of forward.

    Megatron's layers say for their own sites whether they are on; ours ask the kind of the experts.
    """
    mlp = layer.mlp
    experts = getattr(mlp, "experts", None)
    is_sequential = isinstance(experts, load_module("megatron.core.transformer.moe.experts").SequentialMLP)
    has_site = {
        "attn_norm": getattr(layer, "offload_attn_norm", False),
        "qkv_linear": getattr(layer.self_attention, "offload_qkv_linear", False),
        "core_attn": getattr(layer.self_attention, "offload_core_attention", False),
        "attn_proj": getattr(layer.self_attention, "offload_attn_proj", False),
        "mlp_norm": getattr(layer, "offload_mlp_norm", False),
        "expert_fc1": is_sequential or getattr(experts, "offload_expert_fc1", False),
        "moe_act": is_sequential or getattr(experts, "offload_moe_act", False),
    }
    return [tag for tag, is_there in has_site.items() if is_there and tag in selected]


def find_fused_tags(layer: Any, selected: tuple[str, ...]) -> list[str]:
    """Return those of the norms' tags `selected` that have no module of their own: the linear after them does the norm."""
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.pre_mlp_layernorm}
    return [tag for tag, norm in norms.items() if tag in selected and isinstance(norm, identity)]


def check_linears(block: Any) -> None:
    """Refuse linears that find out through an attribute of their saved weight that its gradient is in place already.

    Raises:
        IntegrationError: A linear of Megatron's own in `block` fuses the accumulation of its weight's gradient. Under any
            saved-tensor hooks torch gives a custom function a new tensor for a saved parameter, without its attributes, so
            `grad_added_to_main_grad` would be lost, and the gradient with it. Source: `SavedVariable::unpack` of torch 2.13,
            `LinearWithGradAccumulationAndAsyncCommunication.backward` of megatron-core 0.16.1.
    """
    layers = load_module("megatron.core.tensor_parallel.layers")
    for name, module in block.named_modules():
        is_own = type(module) in (layers.ColumnParallelLinear, layers.RowParallelLinear)
        if is_own and getattr(module, "gradient_accumulation_fusion", False):
            raise IntegrationError(
                f"gradient_accumulation_fusion is on in {name} ({type(module).__name__}), and activation offload cannot work "
                "with it there. Give --no-gradient-accumulation-fusion, or Transformer Engine's layers."
            )


def _wrap(patches: Patches, owner: str, name: str, wrap: Callable[[Any], Any]) -> None:
    require_symbol(owner, name)
    module_name, _, class_name = owner.partition(":")
    patches.replace(owner, name, wrap(getattr(getattr(load_module(module_name), class_name), name)))


def _wrap_block(get_offload: GetOffload, original: Any) -> Any:
    known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            known.add(self)
            check_linears(self)
            selected = get_offload().config.offload_modules
            layers = [layer for layer in self.layers if hasattr(layer, "self_attention")]
            get_offload().register_layers(
                getattr(self, "vp_stage", None) or 0,
                [(layer.layer_number - 1, find_tags(layer, selected), find_fused_tags(layer, selected)) for layer in layers],
            )
        return original(self, *args, **kwargs)

    return forward


def _refuse_overlap(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise IntegrationError(
        "--overlap-moe-expert-parallel-comm together with activation offload is not built yet in this version. Leave one of "
        "them out."
    )


def _wrap_layer(get_offload: GetOffload, original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        offload = get_offload()
        lane = offload.enter_layer(self.layer_number - 1)
        try:
            with offload.engine.watch(lane):
                return original(self, *args, **kwargs)
        except BaseException:
            offload.abandon_microbatch()
            raise

    return forward


def _wrap_checkpoint(get_offload: GetOffload, original: Any) -> Any:
    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        tensors = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        # Before anything can save them: Megatron empties these storages after their last use in forward.
        get_offload().engine.keep_recomputed(t for t in tensors if isinstance(t, torch.Tensor))
        return outputs

    return checkpoint


def _wrap_experts(get_offload: GetOffload, patches: Patches, original: Any) -> Any:
    hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    pass_of_experts: list[_ExpertPass] = []  # the pass that forward is in; experts do not nest

    def find_pass() -> "_ExpertPass | None":
        return pass_of_experts[-1] if pass_of_experts else None

    @functools.wraps(original)
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self not in hooked:
            for expert in self.local_experts:
                for handle in _hook_expert(expert, find_pass):
                    patches.on_remove(handle.remove)
            hooked.add(self)
        current = _ExpertPass(get_offload())
        pass_of_experts.append(current)
        try:
            current.enter(hidden)
            output, bias = original(self, hidden, *args, **kwargs)
            current.end()
            return output, bias
        finally:
            pass_of_experts.pop()
            current.stop_saving()

    return forward


class _ExpertPass:
    """One pass through the experts of a layer: one group for all permuted tokens, one an expert for its activation."""

    def __init__(self, offload: MegatronOffload) -> None:
        self._offload = offload
        self._tokens = offload.find_region("expert_fc1")
        self._activation: Region | None = None
        self._saving: Saving | None = None

    def enter(self, hidden: torch.Tensor) -> None:
        if self._tokens is not None:
            self._tokens.enter(hidden)

    def end(self) -> None:
        if self._tokens is not None:
            self._tokens.end()

    def start_fc1(self) -> None:
        self._save_for(self._tokens)

    def start_activation(self, output: torch.Tensor) -> None:
        self.stop_saving()
        self._activation = self._offload.find_region("moe_act")
        if self._activation is not None:
            self._activation.enter(output)
            self._save_for(self._activation)

    def end_activation(self) -> None:
        region, self._activation = self._activation, None
        if region is not None:
            region.end()

    def stop_saving(self) -> None:
        """Leave the region that forward is in, if any; after an exception too."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(None, None, None)

    def _save_for(self, region: Region | None) -> None:
        if region is not None:
            self._saving = region.saving()
            self._saving.__enter__()


def _hook_expert(expert: Any, find_pass: Callable[[], _ExpertPass | None]) -> Iterator[Any]:
    """Put the sites of one expert around its linears, without touching its forward."""

    def before_fc1(module: torch.nn.Module, args: Any) -> None:
        if (current := find_pass()) is not None:
            current.start_fc1()

    def after_fc1(module: torch.nn.Module, args: Any, result: Any) -> None:
        if (current := find_pass()) is not None:
            current.start_activation(result[0])

    def before_fc2(module: torch.nn.Module, args: Any) -> None:
        if (current := find_pass()) is not None:
            current.stop_saving()

    def after_fc2(module: torch.nn.Module, args: Any, result: Any) -> None:
        if (current := find_pass()) is not None:
            current.end_activation()

    yield expert.linear_fc1.register_forward_pre_hook(before_fc1)
    yield expert.linear_fc1.register_forward_hook(after_fc1)
    yield expert.linear_fc2.register_forward_pre_hook(before_fc2)
    yield expert.linear_fc2.register_forward_hook(after_fc2)
