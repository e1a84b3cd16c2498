"""Detaches outputs of recomputed functions: users do not save an output, and get the recomputed tensor in backward.

    forward     recomputed function  ->  output  ->  user, inside these hooks: saves a stand-in instead
    backward    recomputed function  ->  bitwise identical tensor, which the stand-in views

So nothing references the output after its last use, and backward copies nothing into it.

[Note: Outputs that are still referenced]
Hooks see only tensors that autograd saves inside their context. Other references, such as a user's hook that logs activations
or the checkpoint of a whole MLP, keep the output alive. Then `reruns.py` fills it with a copy. Engine regions that begin
inside the hooks are inert, so the hooks surround only single linears, a router's product, and attention.

[Note: Changes in place]
A hook may change an output in place before its use. A recompute would not repeat the change, so such an output is saved.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

import torch

from fgoffload.engine import Saving, is_inert
from fgoffload.engine.handles import KeptHandle, Packed, keep_tensor
from fgoffload.engine.identity import get_key, get_version, has_bytes, is_without_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.torch_internals import find_top_hooks, pop_hooks, push_hooks


class StandIn:
    """Stand-in in the graph for a view of a recomputed storage, with the view's size, stride and offset."""

    __slots__ = ("__weakref__", "_offset", "_size", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def look_at(self, made: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the storage of `made`."""
        return made.as_strided(self._size, self._stride, self._offset)

    def take(self) -> torch.Tensor:
        """Return the recomputed tensor, for the graph."""
        raise NotImplementedError


class Made:
    """Storage of a recomputed tensor, with the tensor's version and type in forward."""

    __slots__ = ("__weakref__", "_dtype", "_version", "key")

    def __init__(self, tensor: torch.Tensor, key: int) -> None:
        self.key = key
        self._version, self._dtype = get_version(tensor), tensor.dtype

    def pack(self, tensor: torch.Tensor) -> StandIn | None:
        """Return a stand-in for `tensor`, a view of the storage; None if the tensor must be saved."""
        # See [Note: Changes in place].
        is_same = get_version(tensor) == self._version and tensor.dtype == self._dtype and has_bytes(tensor)
        return self.make_stand_in(tensor) if is_same else None

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn | None:
        """Return a stand-in for an unchanged tensor; None if the storage will not be recomputed."""
        raise NotImplementedError


class DetachedOutputs:
    """Context manager around users of recomputed tensors. All other saves inside go to the enclosing hooks.

    Args:
        made: Recomputed tensors, by the key of their storage.
        place: Place that errors name if there are no enclosing hooks.
    """

    __slots__ = ("_made", "_pack", "_place", "_unpack")

    def __init__(self, made: Mapping[int, Made], place: Place) -> None:
        self._made = made
        self._place = place
        hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
        self._pack: Callable[[torch.Tensor], Any] | None = None if hooks is None else hooks[0]
        self._unpack: Callable[[Any], torch.Tensor] | None = None if hooks is None else hooks[1]

    def __enter__(self) -> None:
        """Start saving stand-ins for the recomputed tensors."""
        push_hooks(self.pack, self.unpack)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop saving stand-ins, also after an exception."""
        pop_hooks()
        self._made = {}  # the graph holds this object for its `unpack`

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that is saved for `tensor`."""
        # Most are weights of experts and their empty biases, saved while the device waits for the host. So their storage is
        # not looked up. Without enclosing hooks, they are saved with their version, to detect in-place changes later.
        pack = self._pack
        if type(tensor) is torch.nn.Parameter:
            if pack is None and tensor.is_leaf:
                return tensor, tensor._version  # noqa: SLF001 - the only name
        elif tensor.numel() and type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            made = self._made.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as `get_key`
            stand_in = None if made is None else made.pack(tensor)
            if stand_in is not None:
                _count(pack)
                return stand_in
        elif pack is None and tensor.is_leaf and is_without_bytes(tensor):
            return tensor, tensor._version  # noqa: SLF001 - the only name
        return keep_tensor(tensor, self._place) if pack is None else pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that `packed` stands for."""
        if self._unpack is None:
            if type(packed) is not tuple:
                return _take(packed)
            tensor, version = packed
            if tensor._version == version:  # noqa: SLF001 - the only name
                return cast("torch.Tensor", tensor)
            return KeptHandle(tensor, version, None, self._place).take()  # raises an error that names the cause
        return packed.take() if isinstance(packed, StandIn) else self._unpack(packed)


class Maker(Protocol):
    """Protocol of objects that recompute tensors, such as `Rerun`."""

    @property
    def made(self) -> Mapping[int, Made]:
        """Return the recomputed tensors in use, by the key of their storage."""


class OpenReruns:
    """Registry of recomputes whose outputs are in use. Holds only weak references.

    In one layer, these are its norm, and nested in that the recomputes of its attention or its experts.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Maker]] = []

    def open(self, maker: Maker) -> None:
        """Register `maker` when forward begins to use its output."""
        # A forward that raised has not closed its entries.
        self._found = [reference for reference in self._found if reference() is not None]
        self._found.append(weakref.ref(maker))

    def close(self, maker: Maker) -> None:
        """Remove `maker` once forward no longer uses its output."""
        self._found = [reference for reference in self._found if reference() is not maker]

    def find_made(self) -> Mapping[int, Made]:
        """Return the tensors in use by the key of their storage, or none if our hooks would interfere with other hooks."""
        if not self._found or is_inert():
            return {}
        makers = [maker for maker in (reference() for reference in self._found) if maker is not None]
        if len(makers) == 1:
            return makers[0].made
        return {key: one for maker in makers for key, one in maker.made.items()}


class Input(NamedTuple):
    """A saved input of a recomputed function."""

    unpack: Callable[[], torch.Tensor]
    requires_grad: bool

    def take(self) -> torch.Tensor:
        """Return the input for the recompute."""
        return self.unpack().detach().requires_grad_(self.requires_grad)


def save_input(tensor: torch.Tensor, place: Place, made: Mapping[int, Made]) -> Input:
    """Save `tensor` as autograd would, or as a stand-in if it is in `made`."""
    known = made.get(get_key(tensor)) if made and type(tensor) is torch.Tensor else None
    stand_in = None if known is None else known.pack(tensor)
    pack, unpack = find_hooks(place)
    if stand_in is not None:
        _count(pack)
        return Input(stand_in.take, tensor.requires_grad)
    return Input(functools.partial(unpack, pack(tensor)), tensor.requires_grad)


def _count(pack: Any) -> None:
    """Count one save in the enclosing region, so that it is not treated as empty although it offloads nothing."""
    if isinstance(pack, Saving) and pack.group is not None:
        pack.group.passed_tensors += 1


def find_hooks(place: Place) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the current pack and unpack functions: the innermost hooks, or functions that keep tensors if there are none."""
    hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
    return (functools.partial(keep_tensor, place=place), _take) if hooks is None else hooks


def _take(packed: Packed | StandIn) -> torch.Tensor:
    return packed.take()
