"""Offloads the inputs of Megatron's `CheckpointWithoutOutput` and, under a plan, replaces its recompute.

`CheckpointWithoutOutput` recomputes a norm, an activation or an up-projection. It empties the storages of its outputs and
refills them in backward. Under a plan, `reruns.py` recomputes instead, and results are bitwise identical to training without
recompute. With Megatron's own recompute flags, or with FP8, whose scaling must also be restored, Megatron still recomputes.

[Note: Inputs of CheckpointWithoutOutput]
The checkpoint saves detached aliases of its inputs, and these are leaves. For a saved leaf, torch keeps the node that
accumulates its gradient, even under saved-tensor hooks. The node references the leaf and its storage, so an offloaded input
would stay on the GPU until backward reached it. For a tensor that is not a leaf, torch keeps the node that computed it, which
the graph references anyway. So we save the inputs without detaching them. Results are identical, because Megatron detaches the
inputs before the recompute. In-place changes are still detected, because detached aliases share the version counter.

Sources: `SavedVariable::grad_accumulator_` in torch/csrc/autograd/saved_variable.h of torch 2.13;
`CheckpointWithoutOutputFunction` of megatron-core 0.16.1 to 0.19. Since 2026-08-18, Megatron's development branch (0.20) also
saves the inputs without detaching them (https://github.com/NVIDIA/Megatron-LM/pull/6553).
"""

import functools
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.engine.identity import get_key
from fgoffload.integrations.megatron.adapter.regions import GetOffload
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.reruns import RandomUse, Rerun, as_tuple

CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
FUNCTION = "megatron.core.tensor_parallel.random:CheckpointWithoutOutputFunction"


def wrap_checkpoints(patches: Patches, get_offload: GetOffload) -> None:
    """Wrap `CheckpointWithoutOutput`, to offload its inputs but not its outputs."""
    wrap_symbol(patches, CHECKPOINT, "checkpoint", functools.partial(_checkpoint, get_offload, RandomUse()))
    wrap_symbol(patches, CHECKPOINT, "discard_output_and_register_recompute", functools.partial(_discard, get_offload))
    wrap_symbol(patches, FUNCTION, "forward", save_inputs)


_RERUN = "_fgoffload_rerun"
"""Name of the attribute that holds a checkpoint's `Rerun`."""


def _checkpoint(
    get_offload: GetOffload, random_use: RandomUse, original: Any, checkpoint: Any, run_function: Any, *args: Any
) -> Any:
    offload = get_offload()
    if offload.actions.recomputes and not is_inert() and not _needs_megatron(checkpoint):
        known_outputs = offload.open_reruns.find_outputs()
        name = getattr(run_function, "__name__", type(run_function).__name__)
        rerun = Rerun(run_function, args, name=name, random_use=random_use, known_outputs=known_outputs)
        with rerun:
            outputs = run_function(*args)
        emptied = rerun.record_outputs(outputs)
        offload.open_reruns.add(rerun)
        setattr(checkpoint, _RERUN, rerun)
    else:
        outputs = original(checkpoint, run_function, *args)
        # Since 0.19, an output may also be an input. Such an output is not emptied.
        inputs = args if getattr(checkpoint, "retain_input_tensors", False) else ()
        kept = {get_key(one) for one in inputs if isinstance(one, torch.Tensor)}
        emptied = [one for one in as_tuple(outputs) if isinstance(one, torch.Tensor) and get_key(one) not in kept]
    # Call this before anything saves the outputs, because their storages are emptied after their last use in forward.
    offload.keep_recomputed(emptied)
    return outputs


def _discard(get_offload: GetOffload, original: Any, checkpoint: Any, hook_tensor: torch.Tensor) -> None:
    rerun: Rerun | None = vars(checkpoint).pop(_RERUN, None)
    if rerun is None:
        original(checkpoint, hook_tensor)
        return
    get_offload().open_reruns.discard(rerun)
    rerun.empty_outputs()
    if hook_tensor.requires_grad:
        hook_tensor.register_hook(lambda gradient: rerun.run())  # type: ignore[no-untyped-call]


def _needs_megatron(checkpoint: Any) -> bool:
    """Return whether Megatron must recompute: `checkpoint` has a manager, FP8 is on, or a CUDA graph is being captured."""
    if getattr(checkpoint, "ckpt_manager", None) is not None:
        return True
    if checkpoint.fp8 and load_module("megatron.core.tensor_parallel.random").FP8GlobalStateManager.is_fp8_enabled():
        return True
    graphs = load_module("megatron.core.transformer.cuda_graphs")
    return bool(graphs.is_graph_warmup() or graphs.is_graph_capturing())


def save_inputs(original: Any, ctx: Any, run_function: Any, checkpoint: Any, *args: Any) -> Any:
    """Call the forward of the checkpoint's autograd function, and save the inputs instead of detached aliases.

    See [Note: Inputs of CheckpointWithoutOutput].
    """
    outputs = original(ctx, run_function, checkpoint, *args)
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    saved = ctx.to_save or ()  # torch reads `to_save` after forward
    # Some versions also save None. If a version saves other tensors, they are not replaced, which only costs memory.
    if sum(isinstance(tensor, torch.Tensor) for tensor in saved) == len(inputs):
        remaining = iter(inputs)
        ctx.save_for_backward(*(next(remaining) if isinstance(tensor, torch.Tensor) else tensor for tensor in saved))
    return outputs
