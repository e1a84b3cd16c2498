"""Context manager that offloads all tensors that autograd saves in a block of code."""

import threading
from types import TracebackType

import torch

from fgoffload.engine import is_inert
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import BlockSaving, Forward
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.integrations.pytorch.patterns import check_tag
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import check_bytes


def saved_tensors(
    config: TransferConfig | None = None, *, group_bytes: int | None = None, device: DeviceChoice = None, tag: str = "saved"
) -> "SavedTensors":
    """Return a context manager that offloads the tensors autograd saves inside it, and reloads them for backward.

        offload = fgoffload.saved_tensors()
        for batch in batches:
            with offload:
                loss = criterion(model(batch))
            loss.backward()

    Create the object once and enter it in every step. Pinning host memory takes 0.3 s per GiB or more, and each new object pins
    its own. Backward may run inside the block. Nothing is offloaded inside a checkpoint, with gradients disabled, or during a
    backward.

    Args:
        config: Offload options.
        group_bytes: Group size in bytes. A group is offloaded once it is full. Copies of smaller groups start earlier but take
            more CPU time. None means 64 MiB, or a quarter of `prefetch_bytes` if that is smaller.
        device: Device of the tensors. None selects torch's current accelerator, or the CPU if there is none.
        tag: Name of the block in the statistics.

    Raises:
        ConfigError: `group_bytes` is not above 0, `device` is not a valid device, or `tag` is not an identifier.
    """
    return SavedTensors(config, group_bytes=group_bytes, device=device, tag=tag)


class _Entries(threading.local):
    """Forwards that `__enter__` began in this thread, outermost first. An entry is None if `__enter__` did nothing."""

    def __init__(self) -> None:
        self.open: list[Forward | None] = []


class SavedTensors(EngineOwner):
    """Context manager that offloads the saved tensors of a block of code. Returned by `saved_tensors`.

    It is reusable and reentrant, and several threads may enter it at once.
    """

    def __init__(self, config: TransferConfig | None, *, group_bytes: int | None, device: DeviceChoice, tag: str) -> None:
        check_tag(tag)
        if group_bytes is not None and check_bytes(group_bytes, name="group_bytes") <= 0:
            raise ConfigError(f"group_bytes {group_bytes} is not above 0. Pass a number of bytes, or None for the default.")
        super().__init__(config, device=device, name="saved tensors", tags=(tag,))
        self._given_group_bytes = group_bytes
        self._tag = tag
        self._entries = _Entries()

    def __enter__(self) -> "SavedTensors":
        """Start offloading the tensors that autograd saves."""
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Offload the last group unless an exception was raised. Later saved tensors stay on the device."""
        self._exit(is_failed=error is not None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self) -> None:
        if is_inert() or not self.config.enabled:
            self._entries.open.append(None)
            return
        engine = self.get_engine()
        forward = Forward(self, engine, hook=BlockSaving(self, engine, tag=self._tag, group_bytes=self.group_bytes))
        entries = self._entries.open
        entries.append(forward)
        try:
            forward.begin()
        except BaseException:
            entries.pop()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exit(self, *, is_failed: bool) -> None:
        forward = self._entries.open[-1]
        try:
            if forward is not None:
                forward.finish(is_failed=is_failed)
        finally:
            if forward is not None:
                forward.stop()  # see [Note: Interrupted forwards]
            self._entries.open.pop()
