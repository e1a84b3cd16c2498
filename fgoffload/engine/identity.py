"""Identifies storages and their contents, and tracks when storages are freed."""

from typing import NamedTuple

import torch

from fgoffload.engine.torch_internals import count_storage_references, find_referenced, free_weak_ref, is_expired, make_weak_ref


def get_version(tensor: torch.Tensor) -> int:
    """Return autograd's version counter of `tensor`, which its views share. Return 0 for an inference tensor."""
    try:  # faster than a check of `is_inference` at each save
        return tensor._version  # noqa: SLF001 - no public name
    except RuntimeError:
        return 0


def get_key(tensor: torch.Tensor) -> int:
    """Return the address of the storage of `tensor`. It is unique while the storage or a `StorageRef` to it exists."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - no public name


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are stored as plain bytes in a strided layout."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    # Torch changes the sign of conjugated and negated tensors when it reads them. A zero tensor has no memory.
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())  # noqa: SLF001 - no public name


def is_without_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a plain tensor with an empty storage, such as a placeholder for a missing bias."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0


def shares_allocation(tensor: torch.Tensor) -> bool:
    """Return whether the storage of `tensor` may share its allocation with other storages.

    Transformer Engine allocates the quantized inputs and scales of all experts at once, but each is a separate storage. The
    memory is freed with the last storage. Source: transformer_engine/pytorch/csrc/extensions/allocate.cpp, 2.20.
    """
    return not tensor.untyped_storage().resizable()


def is_of_leaf(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is, or is a view of, a leaf that gets a gradient: a parameter, or an input to the graph.

    The tensor's own `is_leaf` is not enough. Custom functions run forward in no-grad mode, where a view is a leaf that requires
    a gradient even if its base is not a leaf. Transformer Engine saves such a view for each expert.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
    return base.is_leaf and base.requires_grad


class Contents(NamedTuple):
    """Identity of a storage's bytes. Equal values mean unchanged bytes, except for writes that torch does not count."""

    version: int
    """Number of in-place changes."""
    address: int
    """Address of the bytes. It usually changes when a storage is emptied and refilled."""
    nbytes: int


def identify(tensor: torch.Tensor) -> tuple[int, Contents]:
    """Return the result of `get_key` for `tensor`, and the identity of its storage's current bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, Contents(get_version(tensor), storage.data_ptr(), storage.nbytes())  # noqa: SLF001 - no public name


def count_tensors(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of `tensor`, including `tensor` itself and tensors that autograd saved."""
    storage = tensor.untyped_storage()
    return count_storage_references(storage._cdata) - 1  # noqa: SLF001 - no public name; `storage` is a reference too


class StorageRef:
    """Weak reference to a storage. It reserves the storage's address but not its memory.

    Torch's `StorageWeakRef` does the same but takes longer to create, and each saved storage needs a reference.
    """

    __slots__ = ("_free", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._free = free_weak_ref  # at interpreter exit, the module's globals may be deleted before this object
        self.key: int = make_weak_ref(tensor.untyped_storage())
        """Result of `get_key` for tensors of the storage."""

    @property
    def is_freed(self) -> bool:
        """Whether the storage has been freed."""
        return bool(is_expired(self.key))

    def __del__(self) -> None:
        if hasattr(self, "key"):  # false if an interrupt stopped the constructor
            self._free(self.key)

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it is freed."""
        storage: torch.UntypedStorage | None = find_referenced(self.key)
        return storage
