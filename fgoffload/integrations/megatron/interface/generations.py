"""Finds out which generation of Megatron's interface class is installed."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.interface.calls import Calls
from fgoffload.integrations.megatron.interface.development import make_development_methods
from fgoffload.integrations.megatron.interface.refusals import INTERFACE, INTERFACE_PATH, SUPPORTED
from fgoffload.integrations.megatron.interface.released import make_released_methods
from fgoffload.integrations.megatron.patching.imports import load_module

_CONTEXT_METHODS = ("__init__", "__enter__", "__exit__")


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One generation of the interface class."""

    end_of_group: str
    """Method by which its call sites end a group. No other generation has it."""
    make_methods: Callable[[Calls], dict[str, Any]]
    """Returns the replacements for the methods of the class."""

    def check(self, interface: type, methods: Mapping[str, Any]) -> None:
        """Check that `interface` has all of `methods`, with the arguments that call sites pass.

        Raises:
            IntegrationError: A method differs. Names its dotted path and the supported versions.
        """
        for name, method in methods.items():
            if name not in vars(interface):
                raise IntegrationError(
                    f"{INTERFACE_PATH}.{name} does not exist in Megatron-Core {get_version()}, whose groups end by "
                    f"{self.end_of_group}, but activation offload must replace it. Supported: {SUPPORTED}."
                )
            unknown = _get_parameters(vars(interface)[name]) - _get_parameters(method)
            if unknown and name not in _CONTEXT_METHODS:
                raise IntegrationError(
                    f"{INTERFACE_PATH}.{name} of Megatron-Core {get_version()} takes {', '.join(sorted(unknown))}, which this "
                    f"version does not support. Supported: {SUPPORTED}."
                )


GENERATIONS = (
    Generation("group_offload", make_development_methods),
    Generation("group_commit", make_released_methods),
)
"""Known generations, newest first."""


def find_interface() -> type:
    """Return Megatron's interface class.

    Raises:
        IntegrationError: Megatron-Core, the module or the class is missing.
    """
    module_name, _, class_name = INTERFACE.partition(":")
    load_module("megatron.core")  # otherwise the error would name only the module
    try:
        interface = getattr(load_module(module_name), class_name, None)
    except IntegrationError as error:
        raise IntegrationError(
            f"{module_name} does not exist in Megatron-Core {get_version()}, but activation offload replaces methods in it "
            f"({error}). Supported: {SUPPORTED}."
        ) from error
    if not isinstance(interface, type):
        raise IntegrationError(
            f"{INTERFACE_PATH} is not a class in Megatron-Core {get_version()}, but activation offload replaces its methods. "
            f"Supported: {SUPPORTED}."
        )
    return interface


def find_generation(interface: type) -> Generation:
    """Return the generation of `interface`, by its methods.

    Raises:
        IntegrationError: It is of no known generation.
    """
    for generation in GENERATIONS:
        if generation.end_of_group in vars(interface):
            return generation
    known = " nor ".join(f"{INTERFACE_PATH}.{generation.end_of_group}" for generation in GENERATIONS)
    raise IntegrationError(
        f"Neither {known} exists in Megatron-Core {get_version()}: its call sites end their groups in a way that this version "
        f"does not know. Supported: {SUPPORTED}."
    )


def find_unknown(interface: type, methods: Mapping[str, Any]) -> list[str]:
    """Return the public methods of `interface` that are not among `methods`."""
    return [
        name
        for name, value in vars(interface).items()
        if not name.startswith("_")
        and name not in methods
        and (callable(value) or isinstance(value, (staticmethod, classmethod)))
    ]


def get_version() -> str:
    """Return the version that the installed Megatron-Core reports.

    Omits the part after a plus sign, which in 0.19 is the commit of the repository that the process was started in.
    """
    return str(getattr(load_module("megatron.core"), "__version__", "of unknown version")).partition("+")[0]


def _get_parameters(method: Any) -> set[str]:
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    return set(inspect.signature(function).parameters)
