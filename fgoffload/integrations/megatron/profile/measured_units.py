"""Finds the modules that a plan can recompute with bitwise identical results, from the autograd graph of one run.

[Note: Bitwise identical units]
A checkpoint first sums the gradients of its input, and then passes on the sum. If other modules use that input too, a step
without recompute may add their gradients in between, and floating-point sums depend on the order. So a plan may recompute a
unit only if its graph reaches its input once, or if no other module uses that input. `reruns.py` uses the graph of the original
forward, so its results are always bitwise identical. With FP8, units use Megatron's checkpoints instead of `reruns.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.integrations.megatron.adapter.sites import is_quantized
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.recorder import StepRecorder
from fgoffload.integrations.megatron.profile.step_records import ModuleRecord, Run
from fgoffload.integrations.pytorch.outputs import list_tensors
from fgoffload.planner.ranks.layer_model import HostWait

GetRecorder = Callable[[], StepRecorder | None]


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedUnit:
    """Recompute unit that consists of one module of a layer."""

    name: str
    module: torch.nn.Module
    is_refilled: bool
    """Whether the module's output is dropped and recomputed too, as in `CheckpointWithoutOutput` and `reruns.py`. Otherwise,
    only its saved tensors are dropped, and its input is kept, as in `tensor_parallel.checkpoint`."""
    sums_shared_input: bool
    """Whether other modules use its input, and recompute sums the gradients separately. See [Note: Bitwise identical units]."""


LAYER_INPUT = "layer input"
"""Name of the layer's input in the planner's models."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """Properties of a layer, read from its modules."""

    number: int
    kind: str
    """Kind of the layer, for display: `dense` or `moe`."""
    units: tuple[str, ...]
    """Units that can be recomputed."""
    watched: tuple[WatchedUnit, ...]
    """Units that consist of one module, with their modules."""
    wait: HostWait | None
    """How the host synchronizes before it launches the experts, or None if it does not."""
    is_quantized: bool = False
    """Whether the linears use FP8. If so, units use Megatron's checkpoints instead of `reruns.py`."""
    has_sequential_experts: bool = False
    """Whether the layer runs its experts one after another instead of in grouped linears."""


def list_watched(layer: Any, units: tuple[str, ...]) -> list[WatchedUnit]:
    """Return the `units` of a Megatron layer that consist of one module, except up-projections of latent attention."""
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    mlp = layer.mlp
    # Without a norm before it, the MLP shares its input with the residual connection.
    takes_residual = isinstance(layer.pre_mlp_layernorm, identity)
    found = {
        "attn_norm": (layer.input_layernorm, True, True),
        "core_attn": (getattr(layer.self_attention, "core_attention", None), False, False),
        "mlp_norm": (layer.pre_mlp_layernorm, True, True),
        "mlp": (mlp, False, takes_residual),
        "moe": (mlp, False, takes_residual),
        "shared_expert": (getattr(mlp, "shared_experts", None), False, True),
    }
    return [
        WatchedUnit(name, module, is_refilled, is_shared and (not is_refilled or is_quantized(layer.config)))
        for name, (module, is_refilled, is_shared) in found.items()
        if name in units and module is not None
    ]


def watch_units(get_recorder: GetRecorder, watched: list[WatchedUnit]) -> list[Any]:
    """Add hooks that record `watched` units, and return the handles. `get_recorder` must return None outside measured steps."""
    handles = []
    for unit in watched:
        begin, end = (functools.partial(hook, get_recorder, unit.name) for hook in (_begin_unit, _end_unit))
        handles.append(unit.module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(unit.module.register_forward_hook(end, with_kwargs=True))
    return handles


def keeps_bits(unit: WatchedUnit, record: ModuleRecord) -> bool:
    """Return whether recompute of `unit` gives bitwise identical results. See [Note: Bitwise identical units]."""
    return not unit.sums_shared_input or record.input_edges == 1


def _find_run(get_recorder: GetRecorder) -> Run | None:
    recorder = get_recorder()
    return None if recorder is None or is_inert() else recorder.current_layer


def _begin_unit(get_recorder: GetRecorder, unit: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    run = _find_run(get_recorder)
    if run is not None:
        # Megatron's sites enclose the module, so their segment is already running. Our sites are inside the module.
        around = run.current
        tensors = list(list_tensors((args, kwargs)))
        run.modules[unit] = ModuleRecord(
            inputs=frozenset(map(run.name_storage, tensors)),
            input_bytes={run.name_storage(one): one.untyped_storage().nbytes() for one in tensors if one.requires_grad},
            tensor_bytes=frozenset(one.numel() * one.element_size() for one in tensors if one.requires_grad),
            segments={} if around is None or around.tag != unit else {around.name: None},
        )
        run.open_modules |= {unit}


def _end_unit(get_recorder: GetRecorder, unit: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    run = _find_run(get_recorder)
    if run is not None and unit in run.open_modules:
        run.open_modules -= {unit}
        record, outputs = run.modules[unit], list(list_tensors(output))
        record.outputs = frozenset(map(run.name_storage, outputs))
        record.input_edges = count_edges(outputs, list(list_tensors((args, kwargs))))


def count_edges(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> int:
    """Return the maximum number of edges from the graph of `outputs` to any one of `inputs`."""
    found = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
    ends: dict[Any, int] = {(edge.node, edge.output_nr): 0 for edge in found}
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    known = set(nodes)
    while nodes:
        for edge in nodes.pop().next_functions:
            if edge in ends:
                ends[edge] += 1
            elif edge[0] is not None and edge[0] not in known:
                known.add(edge[0])
                nodes.append(edge[0])
    return max(ends.values(), default=0)
