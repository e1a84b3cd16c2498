"""Wraps methods of classes and of single objects, reversibly as `Patches` replaces symbols."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol


def wrap_symbol(patches: Patches, owner: str, name: str, around: Callable[..., Any]) -> None:
    """Call `around` in place of the function or method `name`. Its first argument is the original."""
    require_symbol(owner, name)
    module_name, _, class_name = owner.partition(":")
    module = load_module(module_name)
    original = getattr(getattr(module, class_name) if class_name else module, name)
    patches.replace(owner, name, _wrap(original, around))


def _wrap(original: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def wrap_method(patches: Patches, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around` in place of the method `name` of one object. Other objects of its class do not change.

    A copy of the object gets a method bound to the copy, which therefore uses the copy's parameters. `around` gets the method
    as a function, then the object and the arguments. A method that `patches` have wrapped is not wrapped again. They restore it
    later, if the object is still alive.
    """
    own = vars(target).get(name)
    if getattr(own, _PATCHES, None) is patches:
        return
    original = getattr(type(target), name) if own is None else getattr(own, "__func__", None) or _drop_self(own)
    replacement = _wrap(original, around)
    setattr(replacement, _PATCHES, patches)
    set_attribute(patches, target, name, types.MethodType(replacement, target))


_PATCHES = "_fgoffload_patches"
"""Attribute of a function that holds the patches that wrapped it."""


def _drop_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which a user set on an object, with the object as an additional first argument."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def set_attribute(patches: Patches, target: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of one object, until `patches` are removed."""
    own = vars(target)
    had_own, before = name in own, own.get(name)
    setattr(target, name, value)
    reference = weakref.ref(target)  # a patched model must not be kept alive

    def undo() -> None:
        target = reference()
        # Keeps a value that other code has set since, perhaps around ours.
        if target is None or vars(target).get(name) is not value:
            return
        if had_own:
            setattr(target, name, before)
        else:
            delattr(target, name)

    patches.callback(undo)
