"""Recomputes a function in backward, to restore the saved tensors in the autograd graph of its forward.

    forward     the function runs; tensors that it saves are dropped; its outputs are used, and then emptied
    backward    the function is recomputed; dropped tensors and outputs are restored; then the graph of forward runs

[Note: One graph]
Megatron's `CheckpointWithoutOutput` builds a second graph in the recompute, and runs a nested backward through it. Here,
backward runs through the graph of forward, and takes only the saved tensors from the recompute. So gradients are summed in the
same order as without recompute, and results are bitwise identical for any function. Each saved tensor costs the host three
calls. As in Megatron's checkpoints, the autocast state is not restored.

[Note: Outputs]
The storage of an output is emptied after its last use in forward. Ops inside the hooks of `detached_outputs.py` save a
placeholder, which returns the recomputed tensor in backward. If something still references the emptied storage in backward, the
storage is filled with a copy of the recomputed output, and the placeholders return views of it. An output that was changed in
place before its last use is not emptied, because a recompute would not repeat the change.

[Note: Ownership]
The graph holds the placeholders of dropped tensors and outputs, and these hold the rerun. The rerun holds its packed inputs,
and its detached outputs until they are emptied. It references the placeholders weakly, so dropping the graph frees all of them.

[Note: Random states]
A function that draws random numbers must draw the same ones in its recompute, so the random states of forward are saved and
restored. Saving them doubles the host time of a rerun in forward. So we compare the states before and after the first
run of a function. If they are equal, we assume that the function never draws random numbers.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.engine.handles import KeptHandle, keep_tensor
from fgoffload.engine.identity import get_key, get_version, is_of_leaf, is_without_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.torch_internals import pop_hooks, push_hooks
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.recompute.detached_outputs import (
    DetachedOutputs,
    Output,
    Placeholder,
    make_difference_error,
    save_input,
    take,
)

_RANDOM = "megatron.core.tensor_parallel.random"

RandomUse = weakref.WeakKeyDictionary[Any, bool]
"""Maps each function to whether its first run drew random numbers. See [Note: Random states]."""


class Rerun:
    """A function's run in forward and its recompute in backward. As a context manager, it drops the tensors saved inside it.

    The constructor saves the function's inputs as autograd would, so an enclosing region can offload them.

    Args:
        function: Function of tensors. The same inputs and random states must give the same results.
        args: Arguments of the function.
        name: Name of the recomputed unit, for errors.
        random_use: Cache of which functions draw random numbers; None if this function draws none.
        known_outputs: Outputs of other reruns that forward still uses, keyed by storage key. An input among them is not saved.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        name: str,
        random_use: RandomUse | None,
        known_outputs: Mapping[int, Output],
    ) -> None:
        self._function: Callable[..., Any] | None = function
        self._place = place = Place(None, f"a recompute of {name}")
        self._record_draws: Callable[[bool], None] | None = None
        """Records whether forward drew random numbers; None if that is already known."""
        self._states: tuple[Any, ...] | None = None
        """Random states before forward; None if the function draws no random numbers."""
        anchor = getattr(function, "__code__", function)  # closures of the same code share one entry
        if random_use is not None and random_use.get(anchor, True):
            self._states = _get_states()
            if anchor not in random_use:
                self._record_draws = functools.partial(random_use.__setitem__, anchor)
        self._given = {get_key(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self._inputs = [
            save_input(arg, place, known_outputs) if isinstance(arg, torch.Tensor) else (lambda value=arg: value)
            for arg in args
        ]
        self._dropped: list[tuple[weakref.ref[Placeholder], torch.Size, torch.dtype] | None] = []
        """Tensors that the function saved, in order; None for leaves, which are not dropped, because their owners hold them."""
        self._outputs: list[Output | None] = []
        """Outputs of the function, in order; None for outputs that the recompute need not restore."""
        self.outputs_in_use: Mapping[int, Output] = {}
        """Outputs that forward still uses, keyed by storage key."""

    def __enter__(self) -> "Rerun":
        push_hooks(self._drop, take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pop_hooks()
        record_draws, self._record_draws = self._record_draws, None
        if record_draws is not None and error is None:
            draws = not _are_equal(self._states, _get_states())
            record_draws(draws)
            if not draws:
                self._states = None

    def record_outputs(self, outputs: Any) -> list[torch.Tensor]:
        """Record the outputs, and return the ones to empty: all outputs that are neither inputs nor leaves."""
        emptied, in_use = [], {}
        for output in as_tuple(outputs):
            one = None
            if isinstance(output, torch.Tensor) and not is_of_leaf(output):
                key = get_key(output)
                if key not in self._given:
                    one = in_use[key] = Output(weakref.WeakMethod(self.run), output, is_emptied=True)
                    emptied.append(output)
            self._outputs.append(one)
        self.outputs_in_use = in_use
        return emptied

    def record_freed_output(self, output: torch.Tensor) -> None:
        """Record the only output of a function, which is freed without being emptied."""
        self._outputs = [Output(weakref.WeakMethod(self.run), output, is_emptied=False)]
        self.outputs_in_use = {get_key(output): one for one in self._outputs if one is not None}

    def detached_outputs(self) -> DetachedOutputs:
        """Return a context manager in which autograd saves placeholders for the outputs."""
        return DetachedOutputs(self.outputs_in_use, self._place)

    def empty_outputs(self) -> None:
        """Free the memory of the outputs after their last use in forward. See [Note: Outputs]."""
        self.outputs_in_use = {}
        for output in self._outputs:
            if output is not None:
                output.empty()

    def _drop(self, tensor: torch.Tensor) -> Placeholder | KeptHandle:
        # A fast path: linears of many experts save dozens of weights and empty biases while the device waits for the host.
        if tensor.is_leaf and (type(tensor) is torch.nn.Parameter or (tensor.numel() == 0 and is_without_bytes(tensor))):
            self._dropped.append(None)
            return KeptHandle(tensor, tensor._version, None, self._place)  # noqa: SLF001 - no public name
        if is_of_leaf(tensor):
            self._dropped.append(None)
            return keep_tensor(tensor, self._place)
        placeholder = Placeholder(self.run)
        self._dropped.append((weakref.ref(placeholder), tensor.shape, tensor.dtype))
        return placeholder

    def run(self) -> None:
        """Recompute the function, on the first call only. Refill emptied outputs, and pass dropped tensors to the graph.

        Raises:
            StateError: The recompute differs from forward, or an input or saved tensor was changed in place afterwards.
        """
        function = self._function
        if function is None:
            return
        outputs, found = self._run(function)
        pairs = [(output, again) for output, again in zip(self._outputs, outputs, strict=True) if output is not None]
        for output, again in pairs:
            output.check(again, self._place)
        for output, again in pairs:
            output.restore(again)
        for dropped, tensor in zip(self._dropped, found, strict=True):
            placeholder = None if dropped is None else dropped[0]()
            if placeholder is not None:
                placeholder.tensor = tensor
        # Cleared last, so that another backward can retry after an error. The graph's hooks keep this object alive, but it must
        # not hold the inputs.
        self._function = None
        self._inputs, self._outputs, self._dropped = [], [], []

    def _run(self, function: Callable[..., Any]) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
        """Recompute `function`, and return its outputs and its saved tensors, with None for leaves."""
        inputs = [take_input() for take_input in self._inputs]
        found: list[torch.Tensor | None] = []
        versions: list[int] = []

        def find(tensor: torch.Tensor) -> None:
            dropped = self._dropped[len(found)] if len(found) < len(self._dropped) else None
            if dropped is not None and (tensor.shape, tensor.dtype) != dropped[1:]:
                again = f"saved a tensor of shape {list(tensor.shape)} and type {tensor.dtype}"
                before = f"saved one of shape {list(dropped[1])} and type {dropped[2]}"
                raise make_difference_error(self._place, again, before)
            found.append(None if dropped is None else tensor.detach())
            versions.append(get_version(tensor))

        with _random_states(self._states), torch.enable_grad():
            push_hooks(find, take)
            try:
                outputs = as_tuple(function(*inputs))
            finally:
                pop_hooks()
        if len(found) != len(self._dropped) or len(outputs) != len(self._outputs):
            again = f"saved {len(found)} tensors and returned {len(outputs)}"
            before = f"saved {len(self._dropped)} and returned {len(self._outputs)}"
            raise make_difference_error(self._place, again, before)
        for saved, version in zip(found, versions, strict=True):
            # Autograd makes the same check. The function may change tensors that it did not save.
            if saved is not None and get_version(saved) != version:
                raise StateError(
                    f"A tensor of shape {list(saved.shape)}, saved by {self._place}, was changed in place afterwards. Change a "
                    "clone of it, or set the unit to 'keep' in the plan."
                )
        return outputs, found


class OpenReruns(weakref.WeakSet[Rerun]):
    """Reruns whose outputs forward still uses, such as those of a layer's norm and its attention."""

    def find_outputs(self) -> Mapping[int, Output]:
        """Return the outputs in use, keyed by storage key. The result is empty if saved-tensor hooks must do nothing here."""
        return {} if is_inert() else {key: one for rerun in self for key, one in rerun.outputs_in_use.items()}


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return the results of a function as a tuple, even if there is only one."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _get_states() -> tuple[Any, ...]:
    """Return the random states of the CPU, the GPU, and Megatron's tracker."""
    states: tuple[Any, ...] = load_module(_RANDOM)._get_all_rng_states()  # noqa: SLF001 - no public name
    return states


@contextlib.contextmanager
def _random_states(states: tuple[Any, ...] | None) -> Iterator[None]:
    """Set the random states to `states`, if any, in the body, and restore the current states afterwards."""
    if states is None:
        yield
        return
    random = load_module(_RANDOM)
    with random._fork_rng():  # noqa: SLF001 - no public name
        random._set_all_rng_states(*states)  # noqa: SLF001 - no public name
        yield


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two random states are equal. Those for CUDA graphs have no values to compare, so they are never equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(_are_equal, one, other))
    return False
