"""Replaces symbols of a framework reversibly, from outside of its code."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_ABSENT = object()
"""Marks a name that its owner did not define itself. Restoring it means deleting it."""


class Patches:
    """Replaced symbols. `remove` and leaving the context restore all of them, the last one first."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted paths of the symbols that are replaced now, in order."""
        return tuple(self._names)

    def replace(self, owner: str, name: str, value: Any) -> None:
        """Replace `name` in `owner`.

        Args:
            owner: Dotted path of a module, or of a class in one after a colon: `torch:Tensor`.
            name: Name of the attribute.
            value: New value.

        Raises:
            IntegrationError: There is no such symbol. Names its dotted path.
        """
        require_symbol(owner, name)
        self.define(owner, name, value)

    def define(self, owner: str, name: str, value: Any) -> None:
        """Set `name` in `owner` to `value`, whether or not it was defined.

        Raises:
            IntegrationError: The owner does not exist.
        """
        target = _get_owner(owner)
        # The owner's own dict instead of getattr: a static or inherited method must be restored as such.
        original = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if original is _ABSENT:
            self._undo.callback(delattr, target, name)
        else:
            self._undo.callback(setattr, target, name, original)
        self._names.append(f"{owner.replace(':', '.')}.{name}")

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter `context`, and leave it when the symbols are restored."""
        self._undo.enter_context(context)

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the symbols are restored."""
        self._undo.callback(undo)

    def remove(self) -> None:
        """Restore all symbols. A second call does nothing."""
        self._undo.close()
        self._names.clear()

    def __enter__(self) -> "Patches":
        """Return this object. The symbols are replaced already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Restore all symbols."""
        self.remove()


def require_symbol(owner: str, name: str) -> None:
    """Raise if `owner` lacks `name`, which an integration replaces or relies on.

    Raises:
        IntegrationError: The symbol is missing. Names its dotted path.
    """
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
