"""Identity, version and lifetime of a tensor's bytes."""

from typing import NamedTuple

import torch

from fgoffload.engine.torch_internals import count_storage_references, find_referenced, free_weak_ref, is_expired, make_weak_ref


def get_version(tensor: torch.Tensor) -> int:
    """Return autograd's count of in-place changes of `tensor`, which its views share. 0 for tensors of inference mode."""
    try:  # a check of `is_inference` would slow down each save
        return tensor._version  # noqa: SLF001 - the only name
    except RuntimeError:
        return 0


def get_key(tensor: torch.Tensor) -> int:
    """Return the address of the storage of `tensor`. It is unique as long as the storage or a `StorageRef` to it lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the only name


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are strided and unmodified bytes of a plain storage."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    # Conjugated and negated tensors are read with a change of sign. A zero tensor has no memory.
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())  # noqa: SLF001 - the only name


def is_without_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a plain tensor over an empty storage, such as the missing bias of a linear."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0


def is_piece(tensor: torch.Tensor) -> bool:
    """Return whether the storage of `tensor` is a piece of an allocation that other storages may share.

    Transformer Engine allocates the quantized inputs and scales of all experts at once, as one storage each. The memory is
    freed with the last of them. Source: transformer_engine/pytorch/csrc/extensions/allocate.cpp, 2.20.
    """
    return not tensor.untyped_storage().resizable()


def is_of_leaf(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is, or is a view of, a leaf that gets a gradient: a parameter, or an input of the graph.

    The tensor's own `is_leaf` is not enough. A view made in the forward of a custom function, which runs without grad mode, is
    a leaf that requires a gradient, whatever its base is. Transformer Engine saves one such view for each expert.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
    return base.is_leaf and base.requires_grad


class Contents(NamedTuple):
    """Identity of a storage's bytes. Equal values mean unchanged bytes, except for writes that torch does not count."""

    version: int
    """Number of in-place changes."""
    address: int
    """Address of the bytes. A storage that is emptied and refilled usually gets other memory."""
    nbytes: int


def identify(tensor: torch.Tensor) -> tuple[int, Contents]:
    """Return the key of the storage of `tensor`, as `get_key` does, and the identity of its current bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, Contents(get_version(tensor), storage.data_ptr(), storage.nbytes())  # noqa: SLF001 - the only name


def count_tensors(tensor: torch.Tensor) -> int:
    """Return the number of tensors on the storage of `tensor`, including itself and tensors that autograd saved."""
    storage = tensor.untyped_storage()
    return count_storage_references(storage._cdata) - 1  # noqa: SLF001 - the only name; `storage` is a reference too


class StorageRef:
    """Weak reference to a storage that reserves its address but not its memory.

    Torch's `StorageWeakRef` does the same in twice the steps, and each saved storage needs one.
    """

    __slots__ = ("_free", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._free = free_weak_ref  # at interpreter exit, this module may be gone first
        self.key: int = make_weak_ref(tensor.untyped_storage())
        """Result of `get_key` for tensors of the storage."""

    @property
    def is_freed(self) -> bool:
        """Whether nothing references the storage any more."""
        return bool(is_expired(self.key))

    def __del__(self) -> None:
        if hasattr(self, "key"):  # no interrupt occurred during construction
            self._free(self.key)

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it is freed."""
        storage: torch.UntypedStorage | None = find_referenced(self.key)
        return storage
