"""Recomputes a function in backward, for the graph that its forward built.

    forward     the function runs; tensors that it saves are dropped; its outputs are used, and then emptied
    backward    the function is recomputed; dropped tensors and outputs are restored; then the graph of forward runs

[Note: One graph]
Megatron's checkpoint without output runs the function without a graph, builds one in the recompute, and runs a nested backward
through it. Here, backward uses the graph of forward, and only its saved tensors come from the recompute. So gradients are
summed in the same order as without recompute, and results are bitwise identical for any function. The host builds no second
graph and runs no nested backward. In exchange, each saved tensor costs the host three calls, so a function that saves dozens
costs more. Both keep only the function's inputs, unless a custom function inside keeps tensors without `save_for_backward`.

Non-reentrant `torch.utils.checkpoint` does this for tensors that a function saves. Here, the function's outputs, which other
functions save, are dropped too, and its inputs may be offloaded. As in Megatron's checkpoints, autocast is not restored.

[Note: Outputs]
The storage of an output is emptied after its last use in forward. A user inside the hooks of `detached_outputs.py` has not
saved the output, and gets the recomputed tensor. Then nothing references the storage in backward, and nothing is copied. If
something still does, the storage is filled with a copy, which all users share. An output that was changed in place before its
last use is not emptied, since the recompute would not repeat the change.

[Note: Ownership]
The graph holds the stand-ins of dropped tensors and outputs, and these hold the rerun. The rerun holds its packed inputs, its
detached outputs until they are emptied, and weak references to the stand-ins. Without a cycle, dropping the graph frees all.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from fgoffload.engine.handles import KeptHandle, keep_tensor
from fgoffload.engine.identity import StorageRef, get_key, get_version, is_of_leaf, is_without_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.torch_internals import pop_hooks, push_hooks
from fgoffload.errors import InternalError, StateError
from fgoffload.integrations.megatron.recompute.detached_outputs import DetachedOutputs, Input, Made, StandIn, save_input
from fgoffload.integrations.megatron.recompute.random_states import RandomUse, are_equal, as_in_forward, get_states


class Rerun:
    """One run of a function in forward, and its recompute in backward. As a context manager, it drops tensors saved inside.

    The function's inputs are saved on construction, as autograd would save them here. An enclosing region may offload them.

    Args:
        function: Function of tensors. The same inputs and random states must give the same results.
        args: Arguments of the function.
        name: Name of the recomputed unit, for errors.
        random_use: Record of which functions draw random numbers. With None, the random states are always saved.
        found: Outputs of other recomputes in use. An input that is one of them is not saved.
    """

    __slots__ = (
        *("__weakref__", "_dropped", "_function", "_given", "_inputs", "_note_draws", "_outputs", "_place"),
        *("_states", "made"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        name: str,
        random_use: RandomUse | None = None,
        found: Mapping[int, Made] = MappingProxyType({}),
    ) -> None:
        self._function: Callable[..., Any] | None = function
        self._place = place = Place(None, f"a recompute of {name}")
        draws = None if random_use is None else random_use.draws(function)
        self._note_draws = None if random_use is None or draws is not None else functools.partial(random_use.note, function)
        """Function that records whether forward drew random numbers; None if that is known."""
        self._states = None if draws is False else get_states()
        """Random states before forward; None if it draws no random numbers."""
        self._given = {get_key(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self._inputs = [save_input(arg, place, found) if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._dropped: list[_Dropped | None] = []
        """Tensors that the function saved, in order; None for leaves, which are kept, since their owner holds them anyway."""
        self._outputs: list[_Output | None] = []
        """Outputs of the function, in order; None for those that are not emptied."""
        self.made: Mapping[int, Made] = {}
        """Outputs that forward still uses, by the key of their storage."""

    # Forward.

    def __enter__(self) -> "Rerun":
        """Start dropping tensors that autograd saves."""
        push_hooks(self._drop, _take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop dropping tensors, also after an exception."""
        pop_hooks()
        note_draws, self._note_draws = self._note_draws, None
        if note_draws is not None and error is None:
            draws = not are_equal(self._states, get_states())
            note_draws(draws=draws)
            if not draws:
                self._states = None

    def note_outputs(self, outputs: Any) -> list[torch.Tensor]:
        """Record the outputs, and return those that will be emptied: neither inputs nor leaves."""
        emptied, made = [], {}
        reference = weakref.ref(self)
        for output in as_tuple(outputs):
            one = None
            if isinstance(output, torch.Tensor) and not is_of_leaf(output):
                key = get_key(output)
                if key not in self._given:
                    one = made[key] = _Output(reference, output, key)
                    emptied.append(output)
            self._outputs.append(one)
        self.made = made
        return emptied

    def detached_outputs(self) -> DetachedOutputs:
        """Return a context in which users of the outputs do not save them."""
        return DetachedOutputs(self.made, self._place)

    def empty_outputs(self) -> None:
        """Free the memory of the outputs, which forward no longer needs. See [Note: Outputs].

        As in Megatron's checkpoints, storages that other functions saved are emptied, and refilled before they are needed.
        """
        self.made = {}
        for output in self._outputs:
            if output is not None:
                output.empty()

    def _drop(self, tensor: torch.Tensor) -> "_Packed | KeptHandle":
        # Linears of many experts save dozens of weights and empty biases while the device waits for the host. So these are
        # handled first, without the checks below.
        if tensor.is_leaf and (type(tensor) is torch.nn.Parameter or (tensor.numel() == 0 and is_without_bytes(tensor))):
            self._dropped.append(None)
            return KeptHandle(tensor, tensor._version, None, self._place)  # noqa: SLF001 - the only name
        if is_of_leaf(tensor):
            self._dropped.append(None)
            return keep_tensor(tensor, self._place)
        packed = _Packed(self)
        self._dropped.append(_Dropped(weakref.ref(packed), tensor.shape, tensor.dtype))
        return packed

    # Backward.

    def run(self) -> None:
        """Recompute the function, but only once. Fill emptied outputs, and pass dropped tensors to the graph.

        Raises:
            StateError: The function saved or returned other tensors than in forward, or an input or saved tensor was changed in
                place since.
        """
        function = self._function
        if function is None:
            return
        outputs, found = self._run(function)
        for output, again in zip(self._outputs, outputs, strict=True):
            if output is not None:
                output.check(again, self._place)
        for output, again in zip(self._outputs, outputs, strict=True):
            if output is not None:
                output.give_back(again)
        for dropped, saved in zip(self._dropped, found, strict=True):
            if dropped is not None and saved is not None:
                dropped.give_back(saved.tensor)
        # Cleared last, so that another backward may retry after an error. The graph's hooks keep this object alive as long as
        # the graph, and it must not hold the inputs.
        self._function = None
        self._inputs, self._outputs, self._dropped = [], [], []

    def _run(self, function: Callable[..., Any]) -> "tuple[tuple[Any, ...], list[_Found | None]]":
        """Recompute `function`, and return its outputs and saved tensors, as many of each as in forward."""
        inputs = [arg.take() if isinstance(arg, Input) else arg for arg in self._inputs]
        found: list[_Found | None] = []

        def find(tensor: torch.Tensor) -> None:
            index = len(found)
            dropped = self._dropped[index] if index < len(self._dropped) else None
            if dropped is not None:
                dropped.check(tensor, self._place)
            found.append(None if dropped is None else _Found(tensor.detach(), get_version(tensor)))

        with as_in_forward(self._states), torch.enable_grad():
            push_hooks(find, _refuse)
            try:
                outputs = as_tuple(function(*inputs))
            finally:
                pop_hooks()
        if len(found) != len(self._dropped) or len(outputs) != len(self._outputs):
            raise StateError(
                f"{self._place} saved {len(found)} tensors and returned {len(outputs)}, where forward saved "
                f"{len(self._dropped)} and returned {len(self._outputs)}. It must repeat its forward exactly. Let the plan "
                "keep it."
            )
        for saved in found:
            if saved is not None:
                saved.check(self._place)
        return outputs, found


class _Packed:
    """Stand-in in the graph for a dropped tensor."""

    __slots__ = ("__weakref__", "rerun", "tensor")

    def __init__(self, rerun: Rerun) -> None:
        self.rerun: Rerun | None = rerun
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the recomputed tensor."""
        return _take_made(self)


class _Dropped(NamedTuple):
    """Shape and type of a dropped tensor, with its stand-in."""

    packed: "weakref.ref[_Packed]"
    shape: torch.Size
    dtype: torch.dtype

    def check(self, tensor: torch.Tensor, place: Place) -> None:
        """Check that the recompute saved a tensor of the same shape and type.

        Raises:
            StateError: The shapes or types differ. The error names both.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise StateError(
                f"{place} saved {list(tensor.shape)} of {tensor.dtype} where forward saved {list(self.shape)} of {self.dtype}. "
                "It must repeat its forward exactly. Keep it in the plan instead."
            )

    def give_back(self, tensor: torch.Tensor) -> None:
        """Pass `tensor` to the graph, which keeps it as long as needed."""
        packed = self.packed()
        if packed is not None:
            packed.tensor = tensor


class _Found(NamedTuple):
    """Tensor that the recompute saved in place of a dropped one."""

    tensor: torch.Tensor
    version: int
    """Version of the tensor when it was saved. The function may change the tensor later, the same way in both runs."""

    def check(self, place: Place) -> None:
        """Check that the tensor was not changed in place after it was saved, as autograd would.

        Raises:
            StateError: It was changed in place.
        """
        if get_version(self.tensor) != self.version:
            raise StateError(
                f"A tensor of shape {list(self.tensor.shape)} that {place} saved was changed in place afterwards. Change a "
                "clone of it, or keep the unit in the plan."
            )


class _Output(Made):
    """Storage of an output of the function, without its graph."""

    __slots__ = ("_emptied", "_nbytes", "_rerun", "_stand_ins", "_tensor")

    def __init__(self, rerun: weakref.ref[Rerun], tensor: torch.Tensor, key: int) -> None:
        super().__init__(tensor, key)
        self._rerun = rerun
        self._tensor: torch.Tensor | None = tensor.detach()
        """Detached output while forward uses it. It shares the output's version counter, so in-place changes are detected."""
        self._nbytes = tensor.untyped_storage().nbytes()
        self._emptied: StorageRef | None = None
        """Reference to the emptied storage; None if it is not emptied."""
        self._stand_ins: list[weakref.ref[_HandedOn]] = []

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn | None:
        """Return a stand-in that gets the recomputed tensor; None if forward no longer uses the output."""
        rerun = self._rerun()
        if rerun is None or self._tensor is None:
            return None
        stand_in = _HandedOn(rerun, tensor)
        self._stand_ins.append(weakref.ref(stand_in))
        return stand_in

    def empty(self) -> None:
        """Free the output's memory, which forward no longer needs. An output that was changed in place since is kept."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and get_version(tensor) == self._version:
            self._emptied = StorageRef(tensor)
            tensor.untyped_storage().resize_(0)

    def check(self, again: torch.Tensor, place: Place) -> None:
        """Check that the recompute returned an output of the same size and type.

        Raises:
            StateError: The sizes or types differ. The error names both.
        """
        nbytes = again.untyped_storage().nbytes()
        if nbytes != self._nbytes or again.dtype != self._dtype:
            raise StateError(
                f"{place} returned {again.dtype} over {nbytes} bytes where forward returned {self._dtype} over {self._nbytes}. "
                "It must repeat its forward exactly. Keep it in the plan instead."
            )

    def give_back(self, again: torch.Tensor) -> None:
        """Pass the recomputed output to the graph, and copy it into the emptied storage if something still references that."""
        made = again.detach()
        storage = None if self._emptied is None else self._emptied.find_storage()
        if storage is not None:
            if not storage.nbytes():  # else it was filled with another output that views the same storage
                storage.resize_(self._nbytes)
                storage.copy_(again.untyped_storage())
            made = torch.empty(0, dtype=again.dtype, device=again.device).set_(storage)
        for stand_in in filter(None, (reference() for reference in self._stand_ins)):
            stand_in.tensor = stand_in.look_at(made)


class _HandedOn(StandIn):
    """Stand-in in the graph for an output, or a part of one, that another function saved."""

    __slots__ = ("rerun", "tensor")

    def __init__(self, rerun: Rerun, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.rerun: Rerun | None = rerun
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the recomputed tensor."""
        return _take_made(self)


def _take_made(stand_in: _Packed | _HandedOn) -> torch.Tensor:
    """Return the recomputed tensor for `stand_in`. Runs the recompute now if backward has not done so yet."""
    if stand_in.rerun is not None:
        stand_in.rerun.run()
        stand_in.rerun = None
    if stand_in.tensor is None:
        raise InternalError("a recompute ended without a tensor that backward needs. Please report it.")
    return stand_in.tensor


def _take(packed: _Packed | KeptHandle) -> torch.Tensor:
    return packed.take()


def _refuse(_: None) -> torch.Tensor:
    raise StateError("a recompute's graph has no backward. Please report it.")


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return the results of a function as a tuple, even a single one."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
