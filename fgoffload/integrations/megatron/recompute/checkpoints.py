"""Megatron's checkpoints without output: their inputs may leave, their outputs must stay, and a plan's run for one graph.

`CheckpointWithoutOutput` runs a norm, an activation or an up-projection again: it empties the storages of what they return,
and fills them in backward. Where a plan lets them run again, `reruns.py` does so, with the bits of a training without
recompute. Where Megatron's own flags let them, Megatron does, with the bits of the same flags without offload; and where FP8 is
on, whose scaling Megatron's checkpoint restores.

[Note: Inputs of a checkpoint without output]
It saves detached copies of its inputs. Such a copy needs a gradient and no node has computed it: it is a leaf. With a saved
leaf torch keeps the node that would accumulate its gradient, whatever hooks have made of the tensor; that node holds the leaf,
and the leaf its storage. So an input that was copied to the host was on the device all the same until backward had come to it.
Of an input as it is torch keeps the node that computed it, which the graph has anyway. So the inputs are saved here.

Bits stay. Backward gets the same bytes either way, with the same `requires_grad`, and Megatron detaches them before it runs
the function again. Changes in place are found as before, since a detached copy counts them together with its original. An
input that is a leaf itself, as what a pipeline stage receives, is held by whoever made it one.

Source: `SavedVariable::grad_accumulator_` in torch/csrc/autograd/saved_variable.h of torch 2.13;
`CheckpointWithoutOutputFunction` of megatron-core 0.16.1 to 0.19. Megatron's development branch (0.20) saves the inputs since
2026-08-18 (https://github.com/NVIDIA/Megatron-LM/pull/6553).
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
from fgoffload.integrations.megatron.recompute.random_states import RandomUse
from fgoffload.integrations.megatron.recompute.reruns import Rerun, as_tuple

CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
FUNCTION = "megatron.core.tensor_parallel.random:CheckpointWithoutOutputFunction"


def follow_checkpoints(patches: Patches, get_offload: GetOffload) -> None:
    """Let inputs of checkpoints without output leave, and let their outputs stay.

    Args:
        patches: Put everything back later.
        get_offload: Returns whose engine is told of the outputs; it exists only after everything is wrapped.

    Raises:
        IntegrationError: Megatron-Core has no such checkpoints.
    """
    wrap_symbol(patches, CHECKPOINT, "checkpoint", functools.partial(_run, get_offload))
    wrap_symbol(patches, CHECKPOINT, "discard_output_and_register_recompute", functools.partial(_discard, get_offload))
    wrap_symbol(patches, FUNCTION, "forward", save_inputs)


def _run(get_offload: GetOffload, original: Any) -> Any:
    random_use = RandomUse()

    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        offload = get_offload()
        if offload.actions.recomputes and not is_inert() and not _needs_megatron(self):
            found = offload.open_reruns.find_made()
            rerun = Rerun(run_function, args, name=_name(run_function), random_use=random_use, found=found)
            with rerun:
                outputs = run_function(*args)
            emptied = rerun.note_outputs(outputs)
            offload.open_reruns.open(rerun)
            setattr(self, _RERUN, rerun)
        else:
            outputs = original(self, run_function, *args)
            # Outputs that are inputs too are not emptied, where there are such (since 0.19).
            kept = {get_key(one) for one in args if isinstance(one, torch.Tensor)} if _retains_inputs(self) else set()
            emptied = [one for one in as_tuple(outputs) if isinstance(one, torch.Tensor) and get_key(one) not in kept]
        # Before anything can save them: their storages are emptied after their last use in forward.
        offload.keep_recomputed(emptied)
        return outputs

    return checkpoint


def _discard(get_offload: GetOffload, original: Any) -> Any:
    def discard_output_and_register_recompute(self: Any, hook_tensor: torch.Tensor) -> None:
        rerun: Rerun | None = vars(self).pop(_RERUN, None)
        if rerun is None:
            original(self, hook_tensor)
            return
        get_offload().open_reruns.close(rerun)
        rerun.empty_outputs()
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(lambda gradient: rerun.run())  # type: ignore[no-untyped-call]

    return discard_output_and_register_recompute


_RERUN = "_fgoffload_rerun"
"""What runs again for a checkpoint, as an attribute of it."""


def _needs_megatron(checkpoint: Any) -> bool:
    """Return whether a checkpoint is one of several that run again together, or FP8 is on, or a CUDA graph is being made."""
    if getattr(checkpoint, "ckpt_manager", None) is not None:
        return True
    if checkpoint.fp8 and load_module("megatron.core.tensor_parallel.random").FP8GlobalStateManager.is_fp8_enabled():
        return True
    graphs = load_module("megatron.core.transformer.cuda_graphs")
    return bool(graphs.is_graph_warmup() or graphs.is_graph_capturing())


def _name(function: Any) -> str:
    return type(function).__name__ if isinstance(function, torch.nn.Module) else getattr(function, "__name__", repr(function))


def _retains_inputs(checkpoint: Any) -> bool:
    return bool(getattr(checkpoint, "retain_input_tensors", False))


def save_inputs(original: Any) -> Any:
    """Return a forward of the checkpoints' autograd function that saves its inputs where `original` saves detached copies.

    See [Note: Inputs of a checkpoint without output].
    """

    def forward(ctx: Any, run_function: Any, checkpoint: Any, *args: Any) -> Any:
        outputs = original(ctx, run_function, checkpoint, *args)
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        saved = ctx.to_save or ()  # torch looks at it when forward is through: until then it may be given anew
        # By position: all tensors in their order, with None in between in some versions. Another version that saves something
        # else is left alone; it costs memory, which `StepStats` then counts as held elsewhere.
        if sum(isinstance(tensor, torch.Tensor) for tensor in saved) == len(inputs):
            remaining = iter(inputs)
            ctx.save_for_backward(*(next(remaining) if isinstance(tensor, torch.Tensor) else tensor for tensor in saved))
        return outputs

    return forward
