"""Finds Megatron's interface class and the replacements for its methods, and rejects a class of another version."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.interface.calls import Calls
from fgoffload.integrations.megatron.interface.methods import make_development_methods, make_released_methods
from fgoffload.integrations.megatron.patching.imports import load_module

INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload:FineGrainedActivationOffloadingInterface"
"""Path of Megatron's class, as `Patches` takes it."""
_PATH = INTERFACE.replace(":", ".")
_SUPPORTED = (
    "Supported: megatron-core 0.16.1 to 0.18, where groups end by group_commit, and 0.19 or newer, where by group_offload."
)
_GENERATIONS: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "group_offload": make_development_methods,
    "group_commit": make_released_methods,
}
"""By the method with which call sites end a group, which no other generation has: makes the replacements for all methods."""


def find_interface() -> type:
    """Return Megatron's interface class."""
    module_name, _, class_name = INTERFACE.partition(":")
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


def make_methods(interface: type, calls: Calls) -> dict[str, Any]:
    """Return replacements for the methods of `interface`, by its generation."""
    for end_of_group, make in _GENERATIONS.items():
        if end_of_group in vars(interface):
            return make(calls)
    known = " nor ".join(f"{_PATH}.{end_of_group}" for end_of_group in _GENERATIONS)
    raise IntegrationError(
        f"Neither {known} exists in Megatron-Core {get_version()}: its call sites end their groups in a way that this version "
        f"does not know. {_SUPPORTED}"
    )


def check_methods(interface: type, methods: Mapping[str, Any]) -> None:
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


def make_refusals(interface: type, methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return replacements for the other public methods of `interface`. They raise when a call site first uses one.

    Methods added in a newer version would run Megatron's own engine beside ours.
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
