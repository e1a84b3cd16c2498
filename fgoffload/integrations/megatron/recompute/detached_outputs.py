"""Detached outputs of what is recomputed: whoever uses one saves nothing of it, and gets what the second run makes.

    forward what is recomputed -> its output -> whoever uses it, below these hooks: a stand-in is saved in its place backward
    what is recomputed -> another tensor of the same bits, which the stand-in looks at

So nothing holds the output behind its last use, and nothing is copied into it in backward.

[Note: What is not seen]
Hooks see what autograd saves while they are there. What else holds the output, as a user's hook that logs activations or the
checkpoint of a whole MLP, holds it further, and `reruns.py` fills it with a copy. Regions of the engine that begin inside are
inert, so the hooks are around single linears, a router's product, and attention.

[Note: Changes in place]
A hook may change the output in place before it is used, and to run again would not. What was changed is saved as it is.
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
    """What stands in the graph for a tensor whose storage is made again: where in that it lies."""

    __slots__ = ("__weakref__", "_offset", "_size", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def look_at(self, made: torch.Tensor) -> torch.Tensor:
        """Return the tensor, over the storage of `made`."""
        return made.as_strided(self._size, self._stride, self._offset)

    def take(self) -> torch.Tensor:
        """Return the tensor, for the graph."""
        raise NotImplementedError


class Made:
    """The storage of a tensor that is made again, and what it was when it was made."""

    __slots__ = ("__weakref__", "_dtype", "_version", "key")

    def __init__(self, tensor: torch.Tensor, key: int) -> None:
        self.key = key
        self._version, self._dtype = get_version(tensor), tensor.dtype

    def pack(self, tensor: torch.Tensor) -> StandIn | None:
        """Return what stands for `tensor`, which looks at the storage; None where it is to be saved as it is."""
        # See [Note: Changes in place].
        is_same = get_version(tensor) == self._version and tensor.dtype == self._dtype and has_bytes(tensor)
        return self.make_stand_in(tensor) if is_same else None

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn | None:
        """Return it, for a tensor of the bits and the type that are made again; None where nothing will be."""
        raise NotImplementedError


class DetachedOutputs:
    """A context around whoever uses what is made again. Whatever else is saved inside goes on to the hooks around.

    Args:
        made: By the key of its storage.
        place: For errors, where no hooks are around.
    """

    __slots__ = ("_made", "_pack", "_place", "_unpack")

    def __init__(self, made: Mapping[int, Made], place: Place) -> None:
        self._made = made
        self._place = place
        hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
        self._pack: Callable[[torch.Tensor], Any] | None = None if hooks is None else hooks[0]
        self._unpack: Callable[[Any], torch.Tensor] | None = None if hooks is None else hooks[1]

    def __enter__(self) -> None:
        """Begin to save nothing of them."""
        push_hooks(self.pack, self.unpack)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Hand on no more, after an exception too."""
        pop_hooks()
        self._made = {}  # the graph holds this, for its own `unpack`

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what is saved in place of `tensor`."""
        # Most are weights of experts, and biases that they do not have, and the device waits for the host here: these are not
        # asked for their storage, and without hooks around they are kept as they are, to find changes in place later.
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
        """Return the tensor."""
        if self._unpack is None:
            if type(packed) is not tuple:
                return _take(packed)
            tensor, version = packed
            if tensor._version == version:  # noqa: SLF001 - the only name
                return cast("torch.Tensor", tensor)
            return KeptHandle(tensor, version, None, self._place).take()  # which says what is wrong
        return packed.take() if isinstance(packed, StandIn) else self._unpack(packed)


class Maker(Protocol):
    """What makes tensors again, as `Rerun` does."""

    @property
    def made(self) -> Mapping[int, Made]:
        """Return what of it is in use, by the key of its storage."""


class OpenReruns:
    """What runs again and is in use just now, so that whoever uses it finds it. Nothing here is held.

    Of one layer: its norm, and inside that what its attention, or its experts, run again.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Maker]] = []

    def open(self, maker: Maker) -> None:
        """Forward begins to use what `maker` made."""
        # Of a forward that raised nobody closes anything.
        self._found = [reference for reference in self._found if reference() is not None]
        self._found.append(weakref.ref(maker))

    def close(self, maker: Maker) -> None:
        """Forward is through with what `maker` made."""
        self._found = [reference for reference in self._found if reference() is not maker]

    def find_made(self) -> Mapping[int, Made]:
        """Return what is in use, by the key of its storage; nothing where hooks of ours would reach into those of others."""
        if not self._found or is_inert():
            return {}
        makers = [maker for maker in (reference() for reference in self._found) if maker is not None]
        if len(makers) == 1:
            return makers[0].made
        return {key: one for maker in makers for key, one in maker.made.items()}


class Input(NamedTuple):
    """A saved input of what is recomputed."""

    unpack: Callable[[], torch.Tensor]
    requires_grad: bool

    def take(self) -> torch.Tensor:
        """Return it for the second run."""
        return self.unpack().detach().requires_grad_(self.requires_grad)


def save_input(tensor: torch.Tensor, place: Place, made: Mapping[int, Made]) -> Input:
    """Save `tensor` as autograd would, or what stands for it where it is itself one that is `made` again."""
    known = made.get(get_key(tensor)) if made and type(tensor) is torch.Tensor else None
    stand_in = None if known is None else known.pack(tensor)
    pack, unpack = find_hooks(place)
    if stand_in is not None:
        _count(pack)
        return Input(stand_in.take, tensor.requires_grad)
    return Input(functools.partial(unpack, pack(tensor)), tensor.requires_grad)


def _count(pack: Any) -> None:
    """Let a region that is around count what it would have saved: it has work, of which nothing can leave."""
    if isinstance(pack, Saving) and pack.group is not None:
        pack.group.passed_tensors += 1


def find_hooks(place: Place) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return what packs and unpacks what autograd saves now: the innermost hooks, or without any what holds a tensor."""
    hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
    return (functools.partial(keep_tensor, place=place), _take) if hooks is None else hooks


def _take(packed: Packed | StandIn) -> torch.Tensor:
    return packed.take()
