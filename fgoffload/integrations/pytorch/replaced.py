"""Replaces a module's `forward` with a function that runs it as a region.

[Note: A replaced forward]
The replacement is an attribute of the module instance. Forward hooks would disable torch's fast paths for evaluation and would
not run after a BaseException. A new class for the module would break code that compares classes, as transformers does. The
replacement references the module weakly, to avoid a reference cycle.

A copy of the module must not inherit the attribute, which would run the original module. Copies and pickles use `__getstate__`,
or the class's `__reduce__` as in `fx.GraphModule`, and `nn.DataParallel` uses `_replicate_for_data_parallel`. All of these
methods are replaced too, so that copies omit our attributes.

[Note: A checkpoint around the call]
Layers of transformers before 5.23 checkpoint their own `__call__`, so `forward` runs inside the checkpoint, where a region does
nothing. Such a layer calls its attribute `_gradient_checkpointing_func`, which is replaced too. The replacement runs the whole
checkpoint as a region and offloads the layer's inputs, which the checkpoint saves.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fgoffload.engine.torch_internals import skip
from fgoffload.errors import StateError
from fgoffload.integrations.pytorch.forward import ThreadState
from fgoffload.integrations.pytorch.patterns import ModuleSite

HANDLE = "_fgoffload_handle"
"""Name of the attribute that stores the handle of an offloaded model."""

CHECKPOINT = "_gradient_checkpointing_func"
"""Name of the attribute that stores the checkpoint function of a transformers layer."""

_FORWARD, _STATE, _REDUCE, _REPLICATE = "forward", "__getstate__", "__reduce_ex__", "_replicate_for_data_parallel"
_CALLED = (_FORWARD, CHECKPOINT)
"""Attributes that a `ReplacedForward` may replace."""

_REMOVE_FIRST = "This model is offloaded by fgoffload. Call `remove` on its handle first, and call `offload` again afterwards."


class ReplacedForward:
    """Runs the original forward as a region of a handle. See [Note: A replaced forward].

    `handle` is a `ModelOffload`, or None in a copy, which runs without offload. `site` is None for the model itself. `install`
    sets `before` to the previous value of the module's attribute `name`, such as another wrapper.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        handle: Any = None,
        site: ModuleSite | None = None,
        name: str = _FORWARD,
        before: Callable[..., Any] | None = None,
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._handle = handle
        self._tag = None if site is None else site.tag
        self._layer = 0 if site is None else site.layer
        self._is_checkpointed = site is not None and site.is_checkpointed
        self._name = name
        self._before = before
        self._is_torch_container = False

    def install(self) -> None:
        """Replace the module's attribute, and the methods that copy and pickle the module."""
        module: torch.nn.Module = _get_living(self._module)
        attributes = vars(module)  # not by `setattr`, which wrappers override
        self._before = attributes.get(self._name)
        self._is_torch_container = self._before is None and _is_torch_container(module)
        attributes[self._name] = self
        attributes[_STATE] = _Method(_get_plain_state, module)
        if _reduces_itself(type(module)):
            attributes[_REDUCE] = _Method(_reduce_plain, module)
        attributes[_REPLICATE] = _Method(_make_plain_replica, module)

    def remove(self) -> None:
        """Restore the original forward. Wrappers that others added around this replacement stay in place and still work."""
        self._handle = None
        module = None if self._module is None else self._module()
        if module is not None:
            _strip(vars(module), only_removed=True)

    @skip  # compile only the called function, since torch does not break graphs inside a `try`
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, in a region if gradients are enabled."""
        module = None if self._module is None else self._module()
        forward = self._find_before()
        handle = self._handle
        if handle is None or module is None or torch.compiler.is_exporting():
            return forward(*args, **kwargs)
        if self._is_torch_container:
            forward = functools.partial(_call, forward)
        if self._is_checkpointed and module.training:
            forward = functools.partial(checkpoint, forward, use_reentrant=False)
        forward = handle.wrap(module, forward, (args, kwargs), self._tag, self._layer)
        if handle.is_idle(self._tag, self._layer):
            return forward(*args, **kwargs)
        thread_state = ThreadState()  # see [Note: Interrupted forwards]
        try:
            try:
                run = handle.begin_run(module, (args, kwargs), self._tag, self._layer)
                output = forward(*args, **kwargs)
                if run is not None:
                    run.finish(output)
                return output
            finally:
                thread_state.restore()
        finally:
            thread_state.restore()  # again, in case an interrupt arrived before the inner call

    __call__._torchdynamo_disable_msg = _REMOVE_FIRST  # type: ignore[attr-defined]  # noqa: SLF001 - `skip` takes no reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a `ReplacedForward` of the copied module, without a handle."""
        return ReplacedForward, (None if self._module is None else self._module(), None, None, _FORWARD, self._before)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original forward. Hides `__func__` and `__self__`, which would unwrap it."""
        if name in ("__func__", "__self__") or (name.startswith("_") and not name.startswith("__")):
            raise AttributeError(name)
        return getattr(self._find_before(), name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Original forward, for `inspect.getsource` and `inspect.signature`."""
        before: Callable[..., Any] = self._find_before()
        return before

    @property
    def _torchscript_modifier(self) -> None:
        """Raise a clear error in `torch.jit.script`, which reads this attribute first."""
        raise StateError(_REMOVE_FIRST)

    @skip
    def _find_before(self) -> Callable[..., Any]:
        return self._before or _bind_forward(_get_living(self._module))


class _Method:
    """Calls `function` with `module`, which it references weakly.

    Classes with their own `__deepcopy__`, such as parametrized modules, copy this attribute. The copy uses the copied module.
    """

    def __init__(self, function: Callable[..., Any], module: torch.nn.Module | None) -> None:
        self._function = function
        self._module = None if module is None else weakref.ref(module)

    def __call__(self, *args: Any) -> Any:
        return self._function(_get_living(self._module), *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a `_Method` of the copied module."""
        return _Method, (self._function, None if self._module is None else self._module())


@skip
def _get_living(reference: "weakref.ref[torch.nn.Module] | None") -> torch.nn.Module:
    module = None if reference is None else reference()
    if module is None:
        raise StateError("this forward belongs to a module that was freed. Keep a reference to the module.")
    return module


@skip
def _bind_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the class's forward, bound to `module`."""
    for kind in type(module).__mro__:
        if _FORWARD in vars(kind):
            found = vars(kind)[_FORWARD]
            bound: Callable[..., Any] = found.__get__(module, type(module)) if hasattr(found, "__get__") else found
            return bound
    raise AttributeError(_FORWARD)


def checkpoints_its_call(module: torch.nn.Module) -> bool:
    """Return whether `module` checkpoints its own `__call__`. See [Note: A checkpoint around the call]."""
    return CHECKPOINT in vars(module) and type(module).__call__ is not torch.nn.Module.__call__


def _is_torch_container(module: torch.nn.Module) -> bool:
    """Return whether the module has children and torch's own forward, which `torch.compile` only traces inside other code."""
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.") and any(True for _ in module.children())


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _strip(attributes: dict[str, Any], *, only_removed: bool = False) -> None:
    """Remove our outermost replaced forwards from a module's attributes. If none remains, remove our other attributes."""
    for name in _CALLED:
        found = attributes.get(name)
        while isinstance(found, ReplacedForward) and not (only_removed and found._handle is not None):  # noqa: SLF001
            found = found._before  # noqa: SLF001 - of this class
        if found is None:
            attributes.pop(name, None)
        else:
            attributes[name] = found
    if not any(isinstance(attributes.get(name), ReplacedForward) for name in _CALLED):
        for name in (_STATE, _REDUCE, _REPLICATE, HANDLE):
            attributes.pop(name, None)


def _get_plain_state(module: torch.nn.Module) -> Any:
    """Return the module's state for a copy or pickle, without our attributes."""
    kind: Any = type(module)
    state = kind.__getstate__(module)
    if isinstance(state, dict):
        state = dict(state)
        _strip(state)
    return state


def _reduces_itself(kind: type) -> bool:
    """Return whether a class pickles through its own `__reduce__` instead of `__getstate__`."""
    return any({"__reduce__", _REDUCE} & vars(base).keys() for base in kind.__mro__ if base is not object)


def _reduce_plain(module: torch.nn.Module, protocol: int) -> Any:
    """Return the result of the module's `__reduce_ex__`, without our attributes."""
    kind: Any = type(module)
    plain = object.__new__(kind)  # calling `fx.GraphModule` would create another class
    vars(plain).update(vars(module))
    _strip(vars(plain))
    return plain.__reduce_ex__(protocol)


def _make_plain_replica(module: torch.nn.Module) -> Any:
    """Return a replica of the module for `nn.DataParallel`, without our attributes."""
    kind: Any = type(module)
    replica = kind._replicate_for_data_parallel(module)  # noqa: SLF001 - DataParallel calls it
    _strip(vars(replica))
    return replica
