"""Random states of functions that run again: they draw the same again.

A function that draws random numbers has to draw the same again, so the random states of its forward are kept, and set. Norms,
activations and linears draw none, and to read three states and set them costs the host as much as all else that a rerun does in
forward. So the states are compared before and behind a function the first time that it runs, and where they are the same it is
taken for one that never draws. What drew for the first time later would draw something else in backward.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fgoffload.integrations.megatron.patching.imports import load_module


class RandomUse:
    """Which functions draw random numbers, as far as they have run."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], bool]] = {}
        """By identity of what was asked about, which must be alive still."""

    def draws(self, function: Any) -> bool | None:
        """Return whether `function` draws; None where it has not run yet."""
        anchor = _find_anchor(function)
        found = self._found.get(id(anchor))
        return None if found is None or found[0]() is not anchor else found[1]

    def note(self, function: Any, *, draws: bool) -> None:
        """Take note of what `function` did when it ran for the first time."""
        anchor = _find_anchor(function)
        self._found[id(anchor)] = weakref.ref(anchor), draws


def _find_anchor(function: Any) -> Any:
    """Return what is the same each time: a module itself, and the code of a function, which is made anew for each call."""
    return function if isinstance(function, torch.nn.Module) else getattr(function, "__code__", function)


def get_states() -> tuple[Any, ...]:
    """Return the random states of host and device, and those of Megatron's tracker by name."""
    states: tuple[Any, ...] = _get_random()._get_all_rng_states()  # noqa: SLF001 - the only name
    return states


@contextlib.contextmanager
def as_in_forward(states: tuple[Any, ...] | None) -> Iterator[None]:
    """Draw inside what was drawn behind `states`, and outside what would have been drawn anyway; None where nothing is."""
    if states is None:
        yield
        return
    random = _get_random()
    with random._fork_rng():  # noqa: SLF001 - the only name
        random._set_all_rng_states(*states)  # noqa: SLF001 - the only name
        yield


def are_equal(one: Any, other: Any) -> bool:
    """Return whether nothing was drawn between two random states. Those that are no numbers, as for CUDA graphs, never are."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(are_equal, one, other))
    return False


def _get_random() -> Any:
    return load_module("megatron.core.tensor_parallel.random")
