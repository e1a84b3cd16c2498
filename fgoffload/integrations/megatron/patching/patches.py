"""Replaces symbols of a framework reversibly, from outside of its code."""

import contextlib
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_ABSENT = object()
"""Marks a name that its owner did not define itself. Restoring it means deleting it."""


class Patches(contextlib.ExitStack):
    """Replaced symbols. `remove` and leaving the context restore all of them, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """Dotted paths of the symbols that are replaced now, in order."""

    def replace(self, owner: str, name: str, value: Any) -> None:
        """Replace `name` in `owner`: the dotted path of a module, or of a class in one after a colon, as in `torch:Tensor`.

        Raises:
            IntegrationError: There is no such symbol. Names its dotted path.
        """
        require_symbol(owner, name)
        self.define(owner, name, value)

    def define(self, owner: str, name: str, value: Any) -> None:
        """Set `name` in `owner` to `value`, whether or not it was defined."""
        target = _get_owner(owner)
        # The owner's own dict instead of getattr: a static or inherited method must be restored as such.
        original = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if original is _ABSENT:
            self.callback(delattr, target, name)
        else:
            self.callback(setattr, target, name, original)
        self.names.append(f"{owner.replace(':', '.')}.{name}")
        self.callback(self.names.pop)

    def remove(self) -> None:
        """Restore all symbols. A second call does nothing."""
        self.close()


def require_symbol(owner: str, name: str) -> None:
    """Raise an IntegrationError that names the dotted path if `owner` lacks `name`."""
    if not hasattr(_get_owner(owner), name):
        raise _missing(f"{owner.replace(':', '.')}.{name}")


def _get_owner(path: str) -> Any:
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
        "It exists in torch 2.11 to 2.13 and in megatron-core 0.16.1 to 0.20: install one of those."
    )
