"""Wraps functions and methods, including those of a single object, until their `Patches` are removed."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from fgoffload.integrations.megatron.patching.patches import Patches, get_owner, require_symbol

_PATCHES = "_fgoffload_patches"
"""Attribute of a wrapper that holds its `Patches`."""


def wrap_symbol(patches: Patches, owner: str, name: str, around: Callable[..., Any]) -> None:
    """Call `around` instead of the function or method `name`, with the original as the first argument."""
    require_symbol(owner, name)
    patches.replace(owner, name, _wrap(getattr(get_owner(owner), name), around))


def _wrap(original: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def wrap_method(patches: Patches, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method `name` of one object: calls run `around(method, target, *args, **kwargs)`, with the unbound method.

    In a copy of the object, the method is bound to the copy. A second wrap of a method with the same `patches` does nothing.
    """
    own = vars(target).get(name)
    if getattr(own, _PATCHES, None) is patches:
        return
    original = getattr(type(target), name) if own is None else getattr(own, "__func__", None) or _drop_self(own)
    replacement = _wrap(original, around)
    setattr(replacement, _PATCHES, patches)
    set_attribute(patches, target, name, types.MethodType(replacement, target))


def _drop_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an ignored `self` to a plain function that a user set on an object."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def set_attribute(patches: Patches, target: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of one object, until `patches` are removed."""
    own = vars(target)
    had_own, before = name in own, own.get(name)
    setattr(target, name, value)
    reference = weakref.ref(target)  # patches must not keep a model alive

    def undo() -> None:
        target = reference()
        # Other code may have replaced our value.
        if target is None or vars(target).get(name) is not value:
            return
        if had_own:
            setattr(target, name, before)
        else:
            delattr(target, name)

    patches.callback(undo)
