"""Saves placeholders for the outputs of recomputed functions, and fills them in backward.

    forward     function  ->  output  ->  next op, inside these hooks: saves a placeholder instead of the output
    backward    recompute of the function  ->  bitwise identical output  ->  placeholder  ->  backward of the next op

[Note: Outputs that are still referenced]
Hooks see only tensors that autograd saves inside their context. Other references, such as a user's hook that logs activations
or the checkpoint of a whole MLP, keep the output alive. Then `reruns.py` copies the recomputed output into its storage. Engine
regions that begin inside the hooks do nothing, so the hooks surround only individual linears, a router's matmul, and attention.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine import Saving
from fgoffload.engine.handles import KeptHandle, Packed, keep_tensor
from fgoffload.engine.identity import StorageRef, get_key, get_version, has_bytes, is_without_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.torch_internals import find_top_hooks, pop_hooks, push_hooks
from fgoffload.errors import InternalError, StateError


class Placeholder:
    """Replaces a saved tensor in the autograd graph. `run` recomputes that tensor and sets `tensor`."""

    __slots__ = ("__weakref__", "_run", "tensor")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the recomputed tensor. Recompute it first if backward has not done so yet."""
        if self._run is not None:
            self._run()
            self._run = None
        if self.tensor is None:
            raise InternalError("A recompute did not produce a tensor that backward needs. Please report this.")
        return self.tensor


class Output:
    """Output of a recomputed function, without its autograd graph.

    `run` recomputes the function. If `is_emptied`, the storage is emptied after its last use in forward. Otherwise this
    object does not reference the storage.
    """

    __slots__ = ("_dtype", "_emptied", "_is_used", "_nbytes", "_placeholders", "_run", "_tensor", "_version")

    def __init__(self, run: "weakref.WeakMethod[Callable[[], None]]", tensor: torch.Tensor, *, is_emptied: bool) -> None:
        self._run = run
        self._version, self._dtype = get_version(tensor), tensor.dtype
        self._nbytes = tensor.untyped_storage().nbytes()
        self._tensor: torch.Tensor | None = tensor.detach() if is_emptied else None
        """Detached output, while forward uses it. It shares the output's version counter, so in-place changes are detected."""
        self._is_used = True
        """Whether forward still uses the output."""
        self._emptied: StorageRef | None = None
        self._placeholders: list[tuple[weakref.ref[Placeholder], torch.Size, tuple[int, ...], int]] = []
        """Placeholders for views of the storage, each with the view's size, stride and offset."""

    def pack(self, tensor: torch.Tensor) -> Placeholder | None:
        """Return a placeholder for `tensor`, a view of the storage, or None if the tensor itself must be saved."""
        # A recompute would not repeat an in-place change, for example by a user's hook, so a changed output is saved itself.
        is_same = get_version(tensor) == self._version and tensor.dtype == self._dtype and has_bytes(tensor)
        run = self._run() if is_same and self._is_used else None
        if run is None:
            return None
        placeholder = Placeholder(run)
        self._placeholders.append((weakref.ref(placeholder), tensor.size(), tensor.stride(), int(tensor.storage_offset())))
        return placeholder

    def empty(self) -> None:
        """Free the output's memory after its last use in forward, unless the output was changed in place."""
        tensor, self._tensor, self._is_used = self._tensor, None, False
        if tensor is not None and get_version(tensor) == self._version:
            self._emptied = StorageRef(tensor)
            tensor.untyped_storage().resize_(0)

    def check(self, again: torch.Tensor, place: Place) -> None:
        """Check that the recomputed output `again` has the size and dtype of the original output."""
        nbytes = again.untyped_storage().nbytes()
        if nbytes != self._nbytes or again.dtype != self._dtype:
            raise make_difference_error(
                place, f"returned {again.dtype} of {nbytes} bytes", f"returned {self._dtype} of {self._nbytes} bytes"
            )

    def restore(self, again: torch.Tensor) -> None:
        """Pass the recomputed output to the graph. If the emptied storage is still referenced, copy the output into it."""
        made = again.detach()
        storage = None if self._emptied is None else self._emptied.find_storage()
        if storage is not None:
            if not storage.nbytes():  # otherwise another output that views the same storage has filled it
                storage.resize_(self._nbytes)
                storage.copy_(again.untyped_storage())
            made = torch.empty(0, dtype=again.dtype, device=again.device).set_(storage)
        for reference, size, stride, offset in self._placeholders:
            if (placeholder := reference()) is not None:
                placeholder.tensor = made.as_strided(size, stride, offset)


class DetachedOutputs:
    """Context manager in which autograd saves placeholders for recomputed outputs. Enclosing hooks handle all other saves.

    `outputs` maps storage keys to recomputed outputs. `place` is named in error messages if no other
    saved-tensor hooks are active.
    """

    __slots__ = ("_outputs", "_pack", "_place", "_unpack")

    def __init__(self, outputs: Mapping[int, Output], place: Place) -> None:
        self._outputs = outputs
        self._place = place
        hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
        self._pack: Callable[[torch.Tensor], Any] | None = None if hooks is None else hooks[0]
        self._unpack: Callable[[Any], torch.Tensor] | None = None if hooks is None else hooks[1]

    def __enter__(self) -> None:
        push_hooks(self.pack, self.unpack)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pop_hooks()
        self._outputs = {}  # the graph holds this object for its `unpack`

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that the graph saves instead of `tensor`."""
        # Most saves are weights and empty biases of experts. The device waits while the host handles them, so we do not look up
        # their storages.
        pack = self._pack
        if type(tensor) is torch.Tensor and tensor.numel() and tensor.layout is torch.strided:
            output = self._outputs.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as `get_key`
            placeholder = None if output is None else output.pack(tensor)
            if placeholder is not None:
                _count(pack)
                return placeholder
        elif pack is None and tensor.is_leaf and (type(tensor) is torch.nn.Parameter or is_without_bytes(tensor)):
            return KeptHandle(tensor, tensor._version, None, self._place)  # noqa: SLF001 - no public name
        return keep_tensor(tensor, self._place) if pack is None else pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the saved or recomputed tensor for `packed`."""
        return take(packed) if self._unpack is None or isinstance(packed, Placeholder) else self._unpack(packed)


def save_input(tensor: torch.Tensor, place: Place, outputs: Mapping[int, Output]) -> Callable[[], torch.Tensor]:
    """Save an input of a recomputed function as autograd would, or a placeholder if the input is one of `outputs`.

    Returns a function that returns the detached input.
    """
    output = outputs.get(get_key(tensor)) if outputs and type(tensor) is torch.Tensor else None
    placeholder = None if output is None else output.pack(tensor)
    hooks = find_top_hooks(False)  # noqa: FBT003 - not only while tracing
    pack, unpack = (functools.partial(keep_tensor, place=place), take) if hooks is None else hooks
    requires_grad = tensor.requires_grad
    if placeholder is None:
        packed = pack(tensor)
    else:
        _count(pack)
        packed, unpack = placeholder, take
    return lambda: unpack(packed).detach().requires_grad_(requires_grad)


def _count(pack: Any) -> None:
    """Count a save in the enclosing region. Otherwise the engine would treat the region as empty."""
    if isinstance(pack, Saving) and pack.group is not None:
        pack.group.passed_tensors += 1


def take(packed: Packed | Placeholder) -> torch.Tensor:
    """Return the tensor of a handle or placeholder."""
    return packed.take()


def make_difference_error(place: Place, again: str, before: str) -> StateError:
    """Return the error for a recompute that differs from its forward."""
    return StateError(
        f"{place} {again}, but forward {before}. A recompute must repeat forward exactly. Set its unit to 'keep' in the plan."
    )
