"""Replacing symbols of a framework from outside, and putting them back."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module

_ABSENT = object()
"""Stands for a name that its owner did not define itself, so that putting it back means deleting it."""


class Patches:
    """Replaced symbols. `remove` puts all of them back, the last one first; so does leaving it as a context."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted paths of what is replaced at present, in order."""
        return tuple(self._names)

    def replace(self, owner: str, name: str, value: Any) -> None:
        """Replace `name` in `owner`.

        Args:
            owner: A module's dotted path, or a class in one after a colon: `torch:Tensor`.
            name: The attribute.
            value: What it is from now on.

        Raises:
            IntegrationError: There is no such symbol; the error names its dotted path.
        """
        require_symbol(owner, name)
        self.define(owner, name, value)

    def define(self, owner: str, name: str, value: Any) -> None:
        """Set `name` in `owner` to `value`, whether or not it was defined.

        Raises:
            IntegrationError: The owner does not exist.
        """
        target = _get_owner(owner)
        # The owner's own dict, not getattr: a static or an inherited method must come back as what it was.
        original = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if original is _ABSENT:
            self._undo.callback(delattr, target, name)
        else:
            self._undo.callback(setattr, target, name, original)
        self._names.append(f"{owner.replace(':', '.')}.{name}")

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter `context`, and leave it when everything is put back."""
        self._undo.enter_context(context)

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Call `undo` when everything is put back."""
        self._undo.callback(undo)

    def remove(self) -> None:
        """Put everything back. A second call does nothing."""
        self._undo.close()
        self._names.clear()

    def __enter__(self) -> "Patches":
        """Return this object; the symbols are replaced already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Put everything back."""
        self.remove()


def require_symbol(owner: str, name: str) -> None:
    """Check that `owner` has `name`, which an integration replaces or relies on.

    Raises:
        IntegrationError: It has not; the error names the dotted path.
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
        f"{path} does not exist in the installed version, and this integration replaces it or relies on it. "
        "It exists in torch 2.11 to 2.13 and in megatron-core 0.16.1 to 0.20: install one of those."
    )
