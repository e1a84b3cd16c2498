"""Replaces TRL's activation offload. Import this module in the script, and enable `activation_offloading` in TRL's config.

    import fgoffload.integrations.trl
    trainer = SFTTrainer(model, SFTConfig(activation_offloading=True, ...), ...)

TRL's SFT, DPO, KTO and reward trainers run each training step in the context manager of the replaced function.
"""

import logging
import weakref
from types import TracebackType

import torch

from fgoffload.integrations.entry_points import replace_function
from fgoffload.integrations.pytorch.layers import find_layers
from fgoffload.integrations.pytorch.model import ModelOffload, offload_sites
from fgoffload.transfer_config import DEFAULT_MIN_OFFLOADED_BYTES, HostMemory, TransferConfig

logger = logging.getLogger(__name__)


class TrainingSteps:
    """Context manager for the training steps of one model. Offload starts in the first step."""

    def __init__(self, model: torch.nn.Module, config: TransferConfig) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self.handle: ModelOffload | None = None
        """Offload handle. None before the first step."""

    def __enter__(self) -> None:
        """Offload the layers. By now the trainer has wrapped the model and enabled checkpointing."""
        model = self._model()
        if self.handle is None and model is not None:
            self.handle = offload_sites(model, find_layers(model), self._config)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the step, which sets `handle.last_stats`."""
        if self.handle is not None and error is None:
            self.handle.stats()


def get_act_offloading_ctx_manager(
    model: torch.nn.Module,
    use_pin_memory: bool = True,  # noqa: FBT001, FBT002 - TRL's signature
    use_streams: bool = True,  # noqa: FBT001, FBT002
    min_offload_size: int = DEFAULT_MIN_OFFLOADED_BYTES,
    max_fwd_stash_size: int = 0,
    warn_if_no_head: bool = True,  # noqa: FBT001, FBT002
) -> TrainingSteps:
    """Return the context manager that a trainer enters around each training step.

    Args:
        model: Model whose layers are offloaded.
        use_pin_memory: Whether to pin host memory.
        use_streams: Ignored. Copies always have their own streams.
        min_offload_size: Minimum size of an offloaded storage in bytes. Smaller storages stay on the GPU.
        max_fwd_stash_size: Ignored. `TransferConfig.window_bytes` limits the bytes in flight.
        warn_if_no_head: Ignored. The head is not a layer, so its activations stay on the GPU.
    """
    if not use_streams or max_fwd_stash_size:
        logger.warning("use_streams and max_fwd_stash_size have no effect: fgoffload uses its own streams and limits.")
    memory = HostMemory.PINNED if use_pin_memory else HostMemory.PAGEABLE
    return TrainingSteps(model, TransferConfig(host_memory=memory, min_offloaded_bytes=min_offload_size))


replace_function(
    "trl.models.activation_offloading.get_act_offloading_ctx_manager", get_act_offloading_ctx_manager, versions="0.19 to 1.16"
)
