"""Saves and restores random states, so that a recompute draws the same numbers as forward.

A function that draws random numbers must draw the same ones in its recompute, so the random states of forward are saved and
restored. Norms, activations and linears draw none. Reading and setting three states costs the host as much as the rest of a
rerun in forward. So the states before and after a function are compared in its first run. If they are equal, the function is
assumed never to draw. A function that first draws in a later run would draw different numbers in backward.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fgoffload.integrations.megatron.patching.imports import load_module


class RandomUse:
    """Record of which functions draw random numbers, from their first run."""

    def __init__(self) -> None:
        self._draws: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def draws(self, function: Any) -> bool | None:
        """Return whether `function` draws random numbers; None if it has not run yet."""
        return self._draws.get(_find_anchor(function))

    def note(self, function: Any, *, draws: bool) -> None:
        """Record whether `function` drew random numbers in its first run."""
        self._draws[_find_anchor(function)] = draws


def _find_anchor(function: Any) -> Any:
    """Return an object that all calls share: the module itself, or the code of a function that is created for each call."""
    return function if isinstance(function, torch.nn.Module) else getattr(function, "__code__", function)


def get_states() -> tuple[Any, ...]:
    """Return the random states of host and device, and of Megatron's tracker by name."""
    states: tuple[Any, ...] = _get_random()._get_all_rng_states()  # noqa: SLF001 - the only name
    return states


@contextlib.contextmanager
def as_in_forward(states: tuple[Any, ...] | None) -> Iterator[None]:
    """Draw from `states` inside the context, without affecting draws outside. With None, do nothing."""
    if states is None:
        yield
        return
    random = _get_random()
    with random._fork_rng():  # noqa: SLF001 - the only name
        random._set_all_rng_states(*states)  # noqa: SLF001 - the only name
        yield


def are_equal(one: Any, other: Any) -> bool:
    """Return whether no number was drawn between two random states. States without values (CUDA graphs) are never equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(are_equal, one, other))
    return False


def _get_random() -> Any:
    return load_module("megatron.core.tensor_parallel.random")
