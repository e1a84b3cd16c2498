"""Replaces symbols of a framework reversibly, from outside of its code."""

import contextlib
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_ABSENT = object()
"""Marks a name that its owner did not define. Restoring deletes it."""


class Patches(contextlib.ExitStack):
    """Replaces symbols. `remove`, or leaving the context, restores all of them in reverse order."""

    def replace(self, owner: str, name: str, value: Any) -> None:
        """Replace `name` in `owner`: the dotted path of a module, or with a colon of a class in it, such as `torch:Tensor`.

        Raises:
            IntegrationError: There is no such symbol. Names its dotted path.
        """
        require_symbol(owner, name)
        self.define(owner, name, value)

    def define(self, owner: str, name: str, value: Any) -> None:
        """Set `name` in `owner` to `value`, whether or not it was defined."""
        target = get_owner(owner)
        # The dict instead of getattr, so that a static or inherited method is restored as one.
        original = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if original is _ABSENT:
            self.callback(delattr, target, name)
        else:
            self.callback(setattr, target, name, original)

    def remove(self) -> None:
        """Restore all symbols. A second call does nothing."""
        self.close()


def require_symbol(owner: str, name: str) -> None:
    """Raise an IntegrationError that names the dotted path if `owner` lacks `name`."""
    if not hasattr(get_owner(owner), name):
        raise _missing(f"{owner.replace(':', '.')}.{name}")


def get_owner(path: str) -> Any:
    """Return the module or class with this path. See `Patches.replace`."""
    module_name, _, class_name = path.partition(":")
    module = load_module(module_name)
    if not class_name:
        return module
    if not hasattr(module, class_name):
        raise _missing(f"{module_name}.{class_name}")
    return getattr(module, class_name)


def _missing(path: str) -> IntegrationError:
    return IntegrationError(
        f"{path} does not exist in the installed version, and this integration needs it. "
        "It exists in torch 2.11 to 2.13 and in megatron-core 0.16.1 to 0.20: install one of these versions."
    )
