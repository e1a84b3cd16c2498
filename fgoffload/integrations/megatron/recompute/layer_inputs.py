"""Adds sites for `layer_input`, the inputs that checkpoints of whole layers save under Megatron's flags or a plan.

Megatron's schedule references the input of a pipeline stage's first layer until backward, so offloading it frees nothing. The
engine counts this input as still referenced elsewhere, and keeps it on the GPU from the next step on.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fgoffload.engine import is_inert
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron.adapter.layer_numbers import find_first_layer, get_number
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.adapter.regions import find_tensor, run_in_site
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.detached_outputs import DetachedOutputs

TAG = "layer_input"
BLOCK_MODULE = "megatron.core.transformer.transformer_block"
HYBRID_BLOCK_MODULE = "megatron.core.models.hybrid.hybrid_block"
RECOMPUTE_MODULE = "megatron.core.recompute"
MTP_LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"
PARALLEL = "megatron.core.tensor_parallel"
_PLACE = Place(None, "a checkpoint of part of a layer")


class LayerInputs:
    """Opens a region around each checkpoint of whole layers, but not around Megatron's other checkpoints."""

    def __init__(self, patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
        self.get_offload = get_offload
        self._depth = 0
        # Since 0.18, transformer blocks and hybrid blocks import the same function by name.
        is_function = hasattr(load_module(BLOCK_MODULE), "checkpointed_forward")
        if is_function:
            wrap_symbol(patches, BLOCK_MODULE, "checkpointed_forward", self._run_block)
            wrap_symbol(patches, HYBRID_BLOCK_MODULE, "checkpointed_forward", self._run_block)
        else:
            wrap_symbol(patches, f"{BLOCK_MODULE}:TransformerBlock", "_checkpointed_forward", self._run_block)
        wrap_symbol(patches, MTP_LAYER, "_checkpointed_forward", self._run_mtp_layer)
        wrap_symbol(patches, PARALLEL, "checkpoint", self._checkpoint)
        user = RECOMPUTE_MODULE if is_function else BLOCK_MODULE
        if getattr(load_module(user), "te_checkpoint", None) is not None:  # None or missing without Transformer Engine
            wrap_symbol(patches, user, "te_checkpoint", self._checkpoint)

    @contextlib.contextmanager
    def layers_from(self, number: int) -> Iterator[None]:
        """Treat checkpoints inside the context as checkpoints of whole layers, beginning with layer `number`."""
        self.get_offload().layer = number - 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _run_block(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        with self.layers_from(get_number(block.layers[0])):
            return original(block, *args, **kwargs)

    def _run_mtp_layer(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        with self.layers_from(get_number(find_first_layer(module))):
            return original(module, *args, **kwargs)

    def _checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inert():
            return original(*args, **kwargs)
        offload = self.get_offload()
        if self._depth == 0:
            # A checkpoint of part of a layer saves its input, which may be the output of a recomputed norm.
            outputs = offload.open_reruns.find_outputs()
            with DetachedOutputs(outputs, _PLACE) if outputs else contextlib.nullcontext():
                return original(*args, **kwargs)
        offload.enter_layer(offload.layer + 1)
        # The checkpoint runs the layer with grad mode off, so the layer saves nothing. Then the checkpoint saves its arguments.
        return run_in_site(offload, TAG, find_tensor(args, kwargs), lambda: original(*args, **kwargs))
