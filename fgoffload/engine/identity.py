"""The identity, version and life of a tensor's bytes, which torch has only private names for."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def get_version(tensor: torch.Tensor) -> int:
    """Return how often the bytes of `tensor` were changed in place, as autograd counts; views count together."""
    return tensor._version  # noqa: SLF001 - the only name


def get_key(tensor: torch.Tensor) -> int:
    """Return the address that names the storage of `tensor`, for as long as the storage or a `StorageRef` to it lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the only name


class StorageRef:
    """A reference to a storage that keeps its address from being given to another one, and not its memory."""

    __slots__ = ("_reference", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.key: int = self._reference.cdata

    @property
    def is_freed(self) -> bool:
        """Whether nothing holds the storage any more."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]

    def find_nbytes(self) -> int | None:
        """Return the bytes of the storage now, or None where it is freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.key)  # noqa: SLF001 - the only name
        return None if storage is None else int(storage.nbytes())
