"""Wrapping methods of classes and of single objects, as `Patches` replaces symbols."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol


def wrap_symbol(patches: Patches, owner: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function or method `name` by what `wrap` makes of it.

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

    A copy of the object gets a method that is bound to the copy, and so works on the copy's parameters.

    Args:
        patches: Puts it back later, if the object still lives then. What they have wrapped once stays as it is.
        target: The object.
        name: The method.
        wrap: Is given the method as a function of the object too, and returns such a function that takes its place.
    """
    own = vars(target).get(name)
    if getattr(own, _PATCHES, None) is patches:
        return
    original = getattr(type(target), name) if own is None else getattr(own, "__func__", None) or _drop_self(own)
    replacement = functools.wraps(original)(wrap(original))
    setattr(replacement, _PATCHES, patches)
    set_attribute(patches, target, name, types.MethodType(replacement, target))


_PATCHES = "_fgoffload_patches"
"""Attribute of a function that names its wrapper."""


def _drop_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which a user put into an object as it is, as a function of the object too."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def set_attribute(patches: Patches, target: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of one object, until `patches` are removed."""
    own = vars(target)
    had_own, before = name in own, own.get(name)
    setattr(target, name, value)
    reference = weakref.ref(target)  # a model must not live on because it was patched

    def undo() -> None:
        target = reference()
        # Not what somebody else has put there since, perhaps around ours.
        if target is None or vars(target).get(name) is not value:
            return
        if had_own:
            setattr(target, name, before)
        else:
            delattr(target, name)

    patches.on_remove(undo)
