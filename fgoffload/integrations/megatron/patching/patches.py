"""Replaces symbols of a framework without changing its code, and restores them."""

import contextlib
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_ABSENT = object()
"""Marker for a name that its owner did not define. On restore, the name is deleted."""


class Patches(contextlib.ExitStack):
    """Replaces symbols. `remove`, or leaving the context, restores all of them in reverse order."""

    def replace(self, owner: str, name: str, value: Any) -> None:
        """Replace `name` in `owner`, a path such as `torch` or `torch:Tensor`. Raise an IntegrationError if it is missing."""
        require_symbol(owner, name)
        self.define(owner, name, value)

    def define(self, owner: str, name: str, value: Any) -> None:
        """Set `name` in `owner` to `value`, even if `owner` does not define it."""
        target = get_owner(owner)
        # Unlike getattr, the dict shows whether a method is static or inherited, so it is restored correctly.
        original = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if original is _ABSENT:
            self.callback(delattr, target, name)
        else:
            self.callback(setattr, target, name, original)

    def remove(self) -> None:
        """Restore all symbols. Further calls do nothing."""
        self.close()


def require_symbol(owner: str, name: str) -> None:
    """Raise an IntegrationError with the dotted path if `owner` lacks `name`."""
    if not hasattr(get_owner(owner), name):
        raise _missing(f"{owner.replace(':', '.')}.{name}")


def get_owner(path: str) -> Any:
    """Return the module or class at this path. See `Patches.replace`."""
    module_name, _, class_name = path.partition(":")
    module = load_module(module_name)
    if not class_name:
        return module
    if not hasattr(module, class_name):
        raise _missing(f"{module_name}.{class_name}")
    return getattr(module, class_name)


def _missing(path: str) -> IntegrationError:
    return IntegrationError(
        f"{path} does not exist in the installed version, but this integration needs it. Install versions of torch and "
        "megatron-core listed in docs/reference/tested.md."
    )
