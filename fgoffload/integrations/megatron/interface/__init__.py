"""Makes our engine serve Megatron's own call sites.

Megatron-Core marks its sites with `FineGrainedActivationOffloadingInterface`: a context around the code that saves, and a call
that allows the tensors to be offloaded. Many modules import that class by name, some inside functions. So we keep the class and
replace its methods: all importers, past and future, call ours.

The class has two generations, distinguished by how a group ends and not by version numbers. `methods.py` serves the calls of
both.
"""

import inspect
from collections.abc import Callable, Mapping
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
from fgoffload.integrations.megatron.patching.patches import Patches

_INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload:FineGrainedActivationOffloadingInterface"
"""Path of Megatron's class, as `Patches` takes it."""
_PATH = _INTERFACE.replace(":", ".")
_SUPPORTED = (
    "Supported: megatron-core 0.16.1 to 0.18, which end groups by group_commit, and 0.19 or newer, which end them by "
    "group_offload."
)
_GENERATIONS: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "group_offload": make_development_methods,
    "group_commit": make_released_methods,
}
"""By the method with which call sites end a group, which no other generation has: makes the replacements for all methods."""


def replace_interface(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace the methods of Megatron's interface class, or raise an IntegrationError and replace nothing.

    `get_offload` returns the integration that serves the calls. It exists only after everything is replaced.
    """
    interface = _find_interface()
    methods = _make_methods(interface, Calls(get_offload))
    _check_methods(interface, methods)
    for name, method in (methods | _make_refusals(interface, methods)).items():
        patches.replace(_INTERFACE, name, method)


def is_replaced() -> bool:
    """Return whether Megatron's interface class has our methods now."""
    return bool(vars(_find_interface())["__init__"].__module__ == make_context_methods.__module__)


def is_marked_to_stay(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine marked `tensor` as not to be offloaded: weights in another format, and tensors for FP8.

    It marks tensors that live on after backward. Source: `mark_not_offload` in Transformer Engine's `cpu_offload`, which
    Megatron-Core's own engine respects since 0.19 (`_te_do_not_offload`). Autograd passes on the marked object itself if it
    has no history, as is the case here.
    """
    return getattr(tensor, "_TE_do_not_offload", False) is True


def _find_interface() -> type:
    """Return Megatron's interface class."""
    module_name, _, class_name = _INTERFACE.partition(":")
    load_module("megatron.core")  # otherwise the error would name only the module
    try:
        interface = getattr(load_module(module_name), class_name, None)
    except IntegrationError as error:
        raise IntegrationError(
            f"{module_name} does not exist in Megatron-Core {get_version()}, but activation offload replaces methods in it "
            f"({error}). {_SUPPORTED}"
        ) from error
    if not isinstance(interface, type):
        raise IntegrationError(
            f"{_PATH} is not a class in Megatron-Core {get_version()}, but activation offload replaces its methods. "
            f"{_SUPPORTED}"
        )
    return interface


def _make_methods(interface: type, calls: Calls) -> dict[str, Any]:
    """Return replacements for the methods of `interface`, by its generation."""
    for end_of_group, make in _GENERATIONS.items():
        if end_of_group in vars(interface):
            return make(calls)
    known = " nor ".join(f"{_PATH}.{end_of_group}" for end_of_group in _GENERATIONS)
    raise IntegrationError(
        f"Neither {known} exists in Megatron-Core {get_version()}: its call sites end their groups in a way that this version "
        f"does not know. {_SUPPORTED}"
    )


def _check_methods(interface: type, methods: Mapping[str, Any]) -> None:
    """Check that `interface` has all of `methods`, with the arguments that call sites pass."""
    for name, method in methods.items():
        if name not in vars(interface):
            raise IntegrationError(
                f"{_PATH}.{name} does not exist in Megatron-Core {get_version()}, but activation offload must replace it. "
                f"{_SUPPORTED}"
            )
        unknown = _get_parameters(vars(interface)[name]) - _get_parameters(method)
        if unknown and name not in ("__init__", "__enter__", "__exit__"):
            raise IntegrationError(
                f"{_PATH}.{name} of Megatron-Core {get_version()} takes {', '.join(sorted(unknown))}, which this version does "
                f"not support. {_SUPPORTED}"
            )


def _make_refusals(interface: type, methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return replacements for the other public methods of `interface`. They raise when a call site first uses one.

    Methods added in a newer version would run Megatron's own engine next to ours.
    """

    def refuse(name: str) -> Callable[..., NoReturn]:
        def call(*args: Any, **kwargs: Any) -> NoReturn:
            raise IntegrationError(f"{_PATH}.{name} is called, which this version does not support. {_SUPPORTED}")

        return call

    return {
        name: staticmethod(refuse(name))
        for name, value in vars(interface).items()
        if not name.startswith("_")
        and name not in methods
        and (callable(value) or isinstance(value, (staticmethod, classmethod)))
    }


def get_version() -> str:
    """Return the version that the installed Megatron-Core reports.

    Omits the part after a plus sign, which in 0.19 is the commit of the repository that the process was started in.
    """
    return str(getattr(load_module("megatron.core"), "__version__", "of unknown version")).partition("+")[0]


def _get_parameters(method: Any) -> set[str]:
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    return set(inspect.signature(function).parameters)
