"""One tensor, offloaded and brought back by hand."""

import torch

from fgoffload.engine import Group, Lane, OffloadEngine
from fgoffload.engine.geometry import round_up
from fgoffload.engine.handles import Packed, hold
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device, make_device
from fgoffload.plan import Site
from fgoffload.transfer_config import TransferConfig
from fgoffload.transfer_schedule import SavedState

TAG = "by_hand"
"""The tag under which the statistics count such tensors."""


def check_config(config: object) -> TransferConfig | None:
    """Return `config`, if it is what it has to be.

    Raises:
        ConfigError: It is neither a `TransferConfig` nor None.
    """
    if config is None or isinstance(config, TransferConfig):
        return config
    raise ConfigError(
        f"config {config!r} is not a TransferConfig. Give one, as in TransferConfig(min_offloaded_bytes=0), or None."
    )


def check_tensor(tensor: object) -> None:
    """Refuse what has no bytes of its own that could be moved.

    Raises:
        ConfigError: `tensor` is not a tensor of plain strides.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"offload_tensor was given a {type(tensor).__name__}. Give one tensor.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ConfigError(
            f"offload_tensor was given a tensor of layout {tensor.layout}, which has no storage of its own. Give the tensors "
            "that it is made of, as values() and indices()."
        )


class OffloadedTensor:
    """A tensor that was let go to the host.

    It may have stayed, by the same rules as what autograd saves: a parameter, below the minimum size, no host memory left. Then
    `reload` gives the same bytes all the same, and the statistics say why.

    Lifetime:
        This object owns the bytes on the host, and gives them back when it is dropped. The device memory of the tensor goes
        when its copy is done and nobody else holds it: drop your own references, views included. What `reload` returned
        lives as long as you hold it or this object; it is the same memory at each call.
    """

    __slots__ = ("_engine", "_group", "_handle", "_kind", "_lane")

    def __init__(
        self, handle: Packed, tensor: torch.Tensor, *, engine: OffloadEngine | None, lane: Lane, group: Group | None
    ) -> None:
        self._handle = handle
        self._kind = f"{list(tensor.shape)} {tensor.dtype}"
        self._engine = engine
        self._lane = lane
        self._group = group

    def __repr__(self) -> str:
        """Return where the bytes are, as far as is known without asking the device."""
        saved = () if self._group is None else self._group.list_saved(SavedState.OFFLOADED, SavedState.RELOADED)
        return f"<OffloadedTensor of {self._kind}, {'on the host' if saved else 'on its device'}>"

    @property
    def is_on_host(self) -> bool:
        """Whether the bytes are on the host, and this object no longer holds the tensor's own memory.

        Asking lets go of what finished copies held.
        """
        if self._engine is None or self._group is None:
            return False
        self._engine.poll()
        return bool(self._group.list_saved(SavedState.OFFLOADED, SavedState.RELOADED))

    def prefetch(self) -> None:
        """Start the way back, for a `reload` soon.

        Streams:
            Queued on the host-to-device stream. The host does not block.
        """
        if self._engine is not None and self._group is not None:
            self._engine.approach_backward(self._lane, self._group)

    def reload(self) -> torch.Tensor:
        """Return the tensor on its device: the bytes, size, stride and dtype that it had, without gradient history.

        Streams:
            The current stream waits for the copy to the device. The host does not block.

        Raises:
            StateError: The tensor was changed in place after it was offloaded and before its copy was done; or what an earlier
                `reload` returned was.
        """
        tensor = self._handle.take()
        return tensor.detach() if tensor.requires_grad else tensor  # a parameter, which stayed as it is


def offload_tensor(
    tensor: torch.Tensor, *, config: TransferConfig | None = None, device: DeviceChoice = None
) -> OffloadedTensor:
    """Let one tensor leave for the host, without a model.

    Makes an engine and host memory of exactly the tensor's size for it alone, and locking memory takes 0.3 s a GiB or more. For
    tensors of every step, make one `saved_tensors` object or use the handle of `offload`, and call its `offload_tensor`.

    Args:
        tensor: Stays yours; drop it, so that its device memory goes.
        config: Without one, the tensor leaves whatever its size.
        device: None takes the tensor's.

    Raises:
        ConfigError: `tensor` is not a tensor of plain strides, or `device` names no device.
    """
    check_tensor(tensor)
    check_device(device)
    config = check_config(config) or TransferConfig(min_offloaded_bytes=0)
    if not config.enabled:
        return offload_with(None, tensor)
    needed_bytes = round_up(max(1, tensor.untyped_storage().nbytes()))
    engine = OffloadEngine(
        device=make_device(device, tensors=(tensor,), host_memory=config.host_memory),
        policy=config.derive_policy(),
        min_offloaded_bytes=config.min_offloaded_bytes,
        keep=config.keep,
        is_timed=config.is_timed,
        # The arena takes whole slabs, up to its budget.
        host_budget_bytes=min(needed_bytes, config.host_budget_bytes or needed_bytes),
    )
    return offload_with(engine, tensor)


def offload_with(engine: OffloadEngine | None, tensor: torch.Tensor) -> OffloadedTensor:
    """Let `tensor` leave through `engine`; without one it stays."""
    lane = Lane(chunk=0, microbatch=0)
    if engine is None:
        return OffloadedTensor(hold(tensor, lane.place), tensor, engine=None, lane=lane, group=None)
    group = engine.open_group(Site(chunk=0, layer=0, tag=TAG), lane)
    handle = engine.save(tensor, lane=lane, group=group)
    engine.end(lane, group)
    return OffloadedTensor(handle, tensor, engine=engine, lane=lane, group=group)
