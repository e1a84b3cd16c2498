"""Decides which saved tensors stay on the device because of their kind or size."""

from collections.abc import Callable

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.identity import has_bytes, shares_allocation
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason


class KeepRules:
    """Applies the user's size limits and filter, and excludes tensors that cannot be copied. See `OffloadEngine`."""

    def __init__(
        self, device: Device, *, min_offloaded_numel: int, min_offloaded_bytes: int, keep: Callable[[torch.Tensor], bool] | None
    ) -> None:
        self._device = device
        self._min_offloaded_numel = min_offloaded_numel
        self._min_offloaded_bytes = min_offloaded_bytes
        self._large_numel = max(min_offloaded_numel, min_offloaded_bytes)
        """A tensor of any type with this many elements reaches both minimum sizes."""
        self._keep = keep

    def find_unsupported_kind(self, tensor: torch.Tensor) -> KeptReason | None:
        """Return the reason if tensors of this kind are never offloaded, otherwise None."""
        if type(tensor) is not torch.Tensor:
            return KeptReason.PARAMETER if isinstance(tensor, torch.nn.Parameter) else KeptReason.SUBCLASS
        base = tensor._base  # noqa: SLF001 - no public name
        if base is not None and isinstance(base, torch.nn.Parameter):
            return KeptReason.PARAMETER
        if not has_bytes(tensor):
            return KeptReason.LAYOUT
        if not self._device.owns(tensor):
            return KeptReason.OTHER_DEVICE
        return KeptReason.EMPTY if tensor.numel() == 0 else None

    def is_filtered(self, tensor: torch.Tensor) -> bool:
        """Return whether the user's filter keeps `tensor` on the device."""
        return self._keep is not None and bool(self._keep(tensor))

    def is_always_too_small(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` stays on the device because its whole storage is below the minimum size.

        The result is false for parameters, which are never offloaded, and if there is a filter, which must see each tensor.
        """
        if type(tensor) is not torch.Tensor or tensor.numel() >= self._large_numel or self._keep is not None:
            return False
        if not has_bytes(tensor) or tensor.numel() == 0 or isinstance(tensor._base, torch.nn.Parameter):  # noqa: SLF001 - no public name
            return False
        # Assume elements of one byte, because another tensor saved from the storage may have a narrower type.
        nbytes = tensor.untyped_storage().nbytes()
        return (nbytes < self._min_offloaded_bytes or nbytes < self._min_offloaded_numel) and not shares_allocation(tensor)

    def is_too_small(self, saved: SavedStorage) -> bool:
        """Return whether a storage stays on the device because its saved bytes are below the minimum size."""
        covered_bytes = saved.covered_bytes
        if covered_bytes >= self._min_offloaded_bytes and covered_bytes >= self._min_offloaded_numel * saved.itemsize:
            return False
        # A storage that stays on the device keeps its whole allocation alive.
        return not shares_allocation(saved.get_any_alias())
