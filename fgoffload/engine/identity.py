"""Identity, version and lifetime of a tensor's bytes, for which torch has only private names."""

from typing import NamedTuple

import torch

from fgoffload.engine.torch_internals import count_storage_references, find_referenced, free_weak_ref, is_expired, make_weak_ref


def get_version(tensor: torch.Tensor) -> int:
    """Return how often the bytes of `tensor` were changed in place, as autograd counts; views count together.

    Tensors made in inference mode are not counted, and autograd never saves them: 0.
    """
    try:  # to ask first whether it was would cost each save and each take, for what hardly ever comes
        return tensor._version  # noqa: SLF001 - the only name
    except RuntimeError:
        return 0


def get_key(tensor: torch.Tensor) -> int:
    """Return the address that names the storage of `tensor`, for as long as the storage or a `StorageRef` to it lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the only name


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` lie as they are, by strides, in a storage of its own kind."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    # Conjugated and negated tensors are read with a change of sign; a zero tensor has no memory at all.
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())  # noqa: SLF001 - the only name


def is_without_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a plain tensor over a storage of no bytes, as the bias that a linear does not have."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0


def is_piece(tensor: torch.Tensor) -> bool:
    """Return whether the storage of `tensor` is made of memory that it did not allocate, and that others may have pieces of.

    Transformer Engine allocates the quantized inputs of all experts and their scales at once, and makes a storage of each: the
    memory of all is there until the last of them goes. Source: transformer_engine/pytorch/csrc/extensions/allocate.cpp, 2.20.
    """
    return not tensor.untyped_storage().resizable()


def is_of_leaf(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is, or looks at, a leaf that gets a gradient: a parameter, or an input from outside of the graph.

    The tensor alone does not tell: a view that a custom function makes in its forward, where grad mode is off, says of itself
    that it is such a leaf, whatever it looks at. Transformer Engine saves such views, one for each expert.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
    return base.is_leaf and base.requires_grad


class Contents(NamedTuple):
    """Identifies the bytes of a storage at one moment: equal values of one storage mean unchanged bytes.

    Except for writes that torch does not count: through `tensor.data`, or from outside torch.
    """

    version: int
    """How often they were changed in place."""
    address: int
    """Where they lie. Who empties a storage and fills it again gets other memory, mostly."""
    nbytes: int


def identify(tensor: torch.Tensor) -> tuple[int, Contents]:
    """Return the key of the storage of `tensor`, as `get_key` does, and what names its bytes now."""
    storage = tensor.untyped_storage()
    return storage._cdata, Contents(get_version(tensor), storage.data_ptr(), storage.nbytes())  # noqa: SLF001 - the only name


def count_tensors(tensor: torch.Tensor) -> int:
    """Return how many tensors look at the storage of `tensor`, itself included; those that autograd keeps count too."""
    storage = tensor.untyped_storage()
    return count_storage_references(storage._cdata) - 1  # noqa: SLF001 - the only name; `storage` is a reference of its own


class StorageRef:
    """A weak reference to a storage that reserves its address but not its memory.

    As torch's `StorageWeakRef`, which takes twice the steps; there is one for each saved storage.
    """

    __slots__ = ("_free", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._free = free_weak_ref  # when the interpreter ends, this module may go before the last reference does
        self.key: int = make_weak_ref(tensor.untyped_storage())
        """Key that `get_key` returns for tensors of the storage."""

    @property
    def is_freed(self) -> bool:
        """Whether nothing holds the storage any more."""
        return bool(is_expired(self.key))

    def __del__(self) -> None:
        if hasattr(self, "key"):  # no interrupt occurred during construction
            self._free(self.key)

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None where it is freed."""
        storage: torch.UntypedStorage | None = find_referenced(self.key)
        return storage

    def find_nbytes(self) -> int | None:
        """Return the bytes of the storage now, or None where it is freed."""
        storage = self.find_storage()
        return None if storage is None else storage.nbytes()
