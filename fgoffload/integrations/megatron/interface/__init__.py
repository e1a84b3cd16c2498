"""Connects Megatron's own call sites to our engine.

Megatron-Core marks its sites with `FineGrainedActivationOffloadingInterface`: a context manager around code that saves tensors,
and a call that ends the group of these tensors, so that they may be offloaded. Many modules import that class by name, so we
keep the class and replace its methods. The class has two generations, which differ in the method that ends a group.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.interface.methods import (
    Calls,
    make_context_methods,
    make_development_methods,
    make_released_methods,
)
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol

_INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload:FineGrainedActivationOffloadingInterface"
_PATH = _INTERFACE.replace(":", ".")
_SUPPORTED = (
    "Supported: megatron-core 0.16.1 to 0.18, which end groups with group_commit, and 0.19 or newer, which end them with "
    "group_offload."
)
_GENERATIONS: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "group_offload": make_development_methods,
    "group_commit": make_released_methods,
}
"""Functions that return all replacement methods of a generation, keyed by the method that ends a group in that generation."""


def replace_interface(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace the methods of Megatron's interface class.

    `get_offload` returns the integration that handles the calls. The integration is created after all symbols are replaced.

    Raises:
        IntegrationError: The class is missing, or its methods and arguments match no known generation.
    """
    interface = _find_interface()
    end_of_group = next((name for name in _GENERATIONS if name in vars(interface)), None)
    if end_of_group is None:
        known = " nor ".join(f"{_PATH}.{name}" for name in _GENERATIONS)
        raise IntegrationError(f"Neither {known} exists in Megatron-Core {get_version()}. {_SUPPORTED}")
    methods = _GENERATIONS[end_of_group](Calls(get_offload))
    for name in methods.keys() - _CONTEXT:
        require_symbol(_INTERFACE, name)
        unknown = _get_parameters(getattr(interface, name)) - _get_parameters(methods[name])
        if unknown:
            raise IntegrationError(
                f"{_PATH}.{name} of Megatron-Core {get_version()} takes {', '.join(sorted(unknown))}, but fgoffload does not "
                f"support that. {_SUPPORTED}"
            )
    # A method that only newer versions have would run Megatron's own engine next to ours, so calling it raises an error.
    for name, value in tuple(vars(interface).items()):
        if name not in methods and not name.startswith("_") and (callable(value) or isinstance(value, classmethod)):
            methods[name] = staticmethod(functools.partial(_raise_unsupported, name))
    for name, method in methods.items():
        patches.replace(_INTERFACE, name, method)


_CONTEXT = {"__init__", "__enter__", "__exit__"}


def _get_parameters(method: Any) -> set[str]:
    return set(inspect.signature(method).parameters)


def _raise_unsupported(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise IntegrationError(f"Megatron-Core called {_PATH}.{name}, but fgoffload does not support that method. {_SUPPORTED}")


def is_replaced() -> bool:
    """Return whether Megatron's interface class has our methods."""
    return bool(vars(_find_interface())["__init__"].__module__ == make_context_methods.__module__)


def is_marked_not_offloadable(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine marked `tensor` as not offloadable, because it is needed after backward.

    Hooks receive the marked object itself, because it has no autograd history. Source: `mark_not_offload` in Transformer
    Engine's `cpu_offload`. Megatron-Core's own engine also respects the mark since 0.19 (`_te_do_not_offload`).
    """
    return getattr(tensor, "_TE_do_not_offload", False) is True


def _find_interface() -> type:
    require_symbol(_INTERFACE, "__init__")
    module_name, _, class_name = _INTERFACE.partition(":")
    interface: type = getattr(load_module(module_name), class_name)
    return interface


def get_version() -> str:
    """Return Megatron-Core's version, without the commit after a plus sign."""
    return str(getattr(load_module("megatron.core"), "__version__", "of unknown version")).partition("+")[0]
