"""Running a function again in backward, for the graph that its forward has built.

    forward     the function; what its ops save is dropped; what it returns is used, and then emptied
    backward    the function again: what was dropped, and what it returned, is there once more; then the graph of forward

[Note: One graph]
Megatron's checkpoint without output runs the function without a graph, builds one when it runs again, and goes through that by
a backward within the backward. Here the graph is the one of forward, and only what it saved comes from the second run. So
gradients are summed in the order of a training without recompute, whatever the function is made of, and the bits are the same.
The host has no second graph to go through, and no backward within the backward; each tensor that is saved costs it three calls
instead, so that a function that saves dozens costs more. What is kept is the same, the inputs of the function, unless a custom
function inside keeps something else than by `save_for_backward`.

What `torch.utils.checkpoint` does without reentrance is this for what a function saves. Here what it returns, and others save,
goes too, and its inputs may leave for the host. Autocast is not restored, as Megatron's checkpoints do not.

[Note: What is returned]
Behind its last use in forward the storage of an output is emptied. Who used it below the hooks of `detached_outputs.py` has not
saved it, and gets what the second run returns. Then nothing is left of the storage when backward comes, and nothing is copied.
Where somebody holds it all the same, it is filled with a copy, and all look at that. An output that was changed in place before
its last use is not emptied: the second run would not change it.

[Note: Who holds what]
The graph holds what stands for dropped tensors and for outputs, these hold the rerun, and the rerun holds them weakly, the
inputs packed, and until they are emptied the outputs, without a graph. So there is no cycle, and what drops the graph frees all
of it.
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
    """One run of a function in forward, and the one in backward. As a context it drops what is saved inside.

    What the function is given is saved at once, as autograd would save it here: it may leave with the region around.

    Args:
        function: Computes tensors from tensors, always the same from the same and with the same random states.
        args: What it is given.
        name: What runs again, for errors.
        random_use: What is known of who draws random numbers; None keeps the random states anyway.
        found: What else runs again and is in use: an input of it is not saved.
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
        """Called with what forward does; None where that is known."""
        self._states = None if draws is False else get_states()
        """The random states before forward; None where it draws no random numbers."""
        self._given = {get_key(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self._inputs = [save_input(arg, place, found) if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._dropped: list[_Dropped | None] = []
        """What the function saved, in its order; None for leaves, which stay, since their owner holds them anyway."""
        self._outputs: list[_Output | None] = []
        """What it returned, in its order; None for what is not emptied."""
        self.made: Mapping[int, Made] = {}
        """What it returned and forward uses, by the key of its storage."""

    # Forward.

    def __enter__(self) -> "Rerun":
        """Drop what autograd saves from here on."""
        push_hooks(self._drop, _take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drop no more, after an exception too."""
        pop_hooks()
        note_draws, self._note_draws = self._note_draws, None
        if note_draws is not None and error is None:
            draws = not are_equal(self._states, get_states())
            note_draws(draws=draws)
            if not draws:
                self._states = None

    def note_outputs(self, outputs: Any) -> list[torch.Tensor]:
        """Take note of what the function returned, and return what of it will be emptied: not what it was given, nor a leaf."""
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
        """Return a context for whoever uses the outputs, and saves nothing of them then."""
        return DetachedOutputs(self.made, self._place)

    def empty_outputs(self) -> None:
        """Give back the memory of the outputs, which forward needs no longer. See [Note: What is returned].

        As with Megatron's checkpoints the storages of all who saved them are emptied, and filled before they are asked for.
        """
        self.made = {}
        for output in self._outputs:
            if output is not None:
                output.empty()

    def _drop(self, tensor: torch.Tensor) -> "_Packed | KeptHandle":
        # Linears of many experts save a few dozen weights, and as many biases that they do not have, while the device waits for
        # the host: these first, and without the questions that `hold` asks.
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
        """Run the function again, once: fill what was emptied, and give the graph what was dropped.

        Raises:
            StateError: It has saved or returned something else than in forward, or what it was given, or saved, was changed in
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
        # Only now: after an error another backward may try again. What hooks of the graph hold of this lives as long as the
        # graph does, and must not hold the inputs.
        self._function = None
        self._inputs, self._outputs, self._dropped = [], [], []

    def _run(self, function: Callable[..., Any]) -> "tuple[tuple[Any, ...], list[_Found | None]]":
        """Return what `function` returns, and what it saves, when it runs again: as much of both as in forward."""
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
                f"{len(self._dropped)} and returned {len(self._outputs)}. It must do the same twice: keep it in the plan."
            )
        for saved in found:
            if saved is not None:
                saved.check(self._place)
        return outputs, found


class _Packed:
    """What stands in the graph for a tensor that was dropped."""

    __slots__ = ("__weakref__", "rerun", "tensor")

    def __init__(self, rerun: Rerun) -> None:
        self.rerun: Rerun | None = rerun
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor of the second run."""
        return _take_made(self)


class _Dropped(NamedTuple):
    """What is known of a dropped tensor."""

    packed: "weakref.ref[_Packed]"
    shape: torch.Size
    dtype: torch.dtype

    def check(self, tensor: torch.Tensor, place: Place) -> None:
        """Refuse what the second run has saved in its place, if that is of another kind.

        Raises:
            StateError: With both.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise StateError(
                f"{place} saved {list(tensor.shape)} of {tensor.dtype} where forward saved {list(self.shape)} of {self.dtype}. "
                "It must do the same twice: keep it in the plan."
            )

    def give_back(self, tensor: torch.Tensor) -> None:
        """Let the graph have `tensor`, for as long as it wants it."""
        packed = self.packed()
        if packed is not None:
            packed.tensor = tensor


class _Found(NamedTuple):
    """What the second run saved in the place of a dropped tensor."""

    tensor: torch.Tensor
    version: int
    """Then. The function may have changed it since, in both runs alike."""

    def check(self, place: Place) -> None:
        """Refuse what was changed in place since it was saved, as autograd would.

        Raises:
            StateError: It was.
        """
        if get_version(self.tensor) != self.version:
            raise StateError(
                f"A tensor of shape {list(self.tensor.shape)} that {place} saved was changed in place afterwards. Change a "
                "clone of it, or keep the unit in the plan."
            )


class _Output(Made):
    """The storage of an output of the function, without its graph."""

    __slots__ = ("_emptied", "_nbytes", "_rerun", "_stand_ins", "_tensor")

    def __init__(self, rerun: weakref.ref[Rerun], tensor: torch.Tensor, key: int) -> None:
        super().__init__(tensor, key)
        self._rerun = rerun
        self._tensor: torch.Tensor | None = tensor.detach()
        """While forward uses it: its changes in place count with those of the output."""
        self._nbytes = tensor.untyped_storage().nbytes()
        self._emptied: StorageRef | None = None
        """What was emptied."""
        self._stand_ins: list[weakref.ref[_HandedOn]] = []

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn | None:
        """Return what gets the tensor of the second run; None where forward is through with it."""
        rerun = self._rerun()
        if rerun is None or self._tensor is None:
            return None
        stand_in = _HandedOn(rerun, tensor)
        self._stand_ins.append(weakref.ref(stand_in))
        return stand_in

    def empty(self) -> None:
        """Give back its memory, which forward needs no longer. What was changed in place since it was returned stays."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and get_version(tensor) == self._version:
            self._emptied = StorageRef(tensor)
            tensor.untyped_storage().resize_(0)

    def check(self, again: torch.Tensor, place: Place) -> None:
        """Refuse what the second run has returned in its place, if that is of another size or type.

        Raises:
            StateError: With both.
        """
        nbytes = again.untyped_storage().nbytes()
        if nbytes != self._nbytes or again.dtype != self._dtype:
            raise StateError(
                f"{place} returned {again.dtype} over {nbytes} bytes where forward returned {self._dtype} over {self._nbytes}. "
                "It must do the same twice: keep it in the plan."
            )

    def give_back(self, again: torch.Tensor) -> None:
        """Let the graph have what the second run returned, and whoever holds what was emptied a copy of it."""
        made = again.detach()
        storage = None if self._emptied is None else self._emptied.find_storage()
        if storage is not None:
            if not storage.nbytes():  # else it was filled with another output, which looks at the same storage
                storage.resize_(self._nbytes)
                storage.copy_(again.untyped_storage())
            made = torch.empty(0, dtype=again.dtype, device=again.device).set_(storage)
        for stand_in in filter(None, (reference() for reference in self._stand_ins)):
            stand_in.tensor = stand_in.look_at(made)


class _HandedOn(StandIn):
    """What stands in the graph for an output, or a part of one, in the place where somebody else saved it."""

    __slots__ = ("rerun", "tensor")

    def __init__(self, rerun: Rerun, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.rerun: Rerun | None = rerun
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor of the second run."""
        return _take_made(self)


def _take_made(stand_in: _Packed | _HandedOn) -> torch.Tensor:
    """Return what the second run made in the place of `stand_in`. It is run now if backward has not come by its end."""
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
    """Return what a function returned, one thing or several, as several."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
