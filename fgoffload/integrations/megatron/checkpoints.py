"""What Megatron's checkpoints without output save: their inputs may leave, and their outputs must stay.

`CheckpointWithoutOutput` runs a norm, an activation or an up-projection again: it empties the storages of what they return,
and fills them in backward.

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
from collections.abc import Iterable
from typing import Any

import torch

from fgoffload.engine.identity import get_key
from fgoffload.integrations.megatron.methods import wrap_symbol
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.regions import GetOffload

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
    wrap_symbol(patches, CHECKPOINT, "checkpoint", functools.partial(_keep_outputs, get_offload))
    wrap_symbol(patches, FUNCTION, "forward", functools.partial(_save_what_may_leave, get_offload))


def _keep_outputs(get_offload: GetOffload, original: Any) -> Any:
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        if get_offload().is_idle:
            return outputs
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


def _save_what_may_leave(get_offload: GetOffload, original: Any) -> Any:
    saving_inputs = save_inputs(original)

    def forward(ctx: Any, *args: Any) -> Any:
        return original(ctx, *args) if get_offload().is_idle else saving_inputs(ctx, *args)

    return forward


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
