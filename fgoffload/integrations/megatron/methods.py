"""Wrapping methods of classes and of single objects, as `Patches` replaces symbols."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.patches import Patches, require_symbol


def wrap_symbol(patches: Patches, owner: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function or method `name` by what `wrap` makes of it.

    Args:
        patches: Puts it back later.
        owner: A module, or a class as `module:Class`.
        name: The function or method.
        wrap: Is given the original and returns what takes its place.

    Raises:
        IntegrationError: There is no such symbol; the error names its dotted path.
    """
    require_symbol(owner, name)
    module_name, _, class_name = owner.partition(":")
    module = load_module(module_name)
    original = getattr(getattr(module, class_name) if class_name else module, name)
    patches.replace(owner, name, functools.wraps(original)(wrap(original)))


def wrap_method(patches: Patches, target: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the method `name` of one object, and of no other of its class, by what `wrap` makes of it.

    Args:
        patches: Puts it back later, if the object still lives then.
        target: The object.
        name: The method.
        wrap: Is given the bound method and returns what takes its place.
    """
    original = getattr(target, name)
    set_attribute(patches, target, name, functools.wraps(original)(wrap(original)))


def set_attribute(patches: Patches, target: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of one object, until `patches` are removed."""
    own = vars(target)
    had_own, before = name in own, own.get(name)
    setattr(target, name, value)
    reference = weakref.ref(target)  # a model must not live on because it was patched

    def undo() -> None:
        target = reference()
        if target is None:
            return
        if had_own:
            setattr(target, name, before)
        else:
            delattr(target, name)

    patches.on_remove(undo)
