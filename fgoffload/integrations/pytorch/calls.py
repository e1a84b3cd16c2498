"""Modules that forward is in, and what closes them where torch calls no hooks.

[Note: Interrupted forwards]
Forward hooks with `always_call` run after an `Exception`. After anything else, a `KeyboardInterrupt` for one, torch calls none,
and what the module had opened would stay on the thread. So `forward` of the model is an object in its own attributes; it calls
the forward that was there before and closes on what is no `Exception`. `remove` takes it out again. A module that is called
outside of the model's forward gets one at its first call.

It holds the module weakly, so that nothing waits for Python's cyclic collector, and a copy of the module gets one that calls
the copy's. Where a hook of ours ran before it, the module is the one that the hook was told: a shallow copy shares the object.

What an interrupt leaves open beside these, in a hook of somebody else or in the first call of such a module, is found by the
model's next forward: calls are open while no forward runs.
"""

import copy
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.decorators import skip

from fgoffload.errors import StateError
from fgoffload.integrations.pytorch.forward import Forward, SavingRegion

_NAME = "forward"


@dataclasses.dataclass(slots=True)
class Call:
    """One module that forward is in."""

    module: torch.nn.Module
    error: BaseException | None
    """The exception that was being handled when it began, by code around it."""
    own_forward: Forward | None = None
    """The forward that began with this module, and ends with it."""
    forward: Forward | None = None
    """The forward whose layer it is, where it is a region."""
    region: SavingRegion | None = None

    def close(self, output: Any, *, is_failed: bool) -> None:
        """Forward has left the module."""
        try:
            if self.forward is not None:
                self.forward.layers.pop()
            if self.region is not None:
                self.region.close(output, is_failed=is_failed)
        finally:
            if self.own_forward is not None:
                self.own_forward.finish(is_failed=is_failed)


class Calls(threading.local):
    """The modules that this thread is in, outermost first; those with hooks of one handle."""

    def __init__(self) -> None:
        self.open: list[Call] = []
        self.running = 0
        """How many forwards of these modules this thread is in: none where what is open was left behind."""

    def abandon(self, count: int = 0) -> None:
        """Close what was opened after the first `count`, as failed."""
        while len(self.open) > count:
            self.open.pop().close(None, is_failed=True)


class WatchedForward:
    """Stands in place of a module's `forward`. See [Note: Interrupted forwards]."""

    def __init__(self, module: torch.nn.Module | None, calls: Calls, before: Callable[..., Any] | None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._calls = calls
        self._before = before  # what the module had in this place for itself, as a wrapper of somebody else's

    @classmethod
    def put(cls, module: torch.nn.Module, calls: Calls) -> "WatchedForward":
        """Put one in place of the forward of `module`."""
        watched = cls(module, calls, vars(module).get(_NAME))
        vars(module)[_NAME] = watched  # not by `setattr`, of which wrappers have their own
        return watched

    def remove(self) -> None:
        """Put back what was there before. What somebody put around this one since stays, and still calls it."""
        module = None if self._module is None else self._module()
        if module is None or vars(module).get(_NAME) is not self:
            return
        if self._before is None:
            del vars(module)[_NAME]
        else:
            vars(module)[_NAME] = self._before

    # Only what it calls is compiled: torch breaks no graph inside of a `try`. Without `skip` it would look at each call again.
    @functools.partial(torch.compiler.disable, recursive=False)
    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that was there before, and close what it leaves open."""
        calls = self._calls
        own = calls.open[-1].module if calls.open else None
        is_own = own is not None and vars(own).get(_NAME) is self
        count = len(calls.open) - is_own
        forward = self._find_forward(own if is_own else None)
        calls.running += 1
        try:
            return forward(*args, **kwargs)
        except Exception:
            raise  # torch calls our hook
        except BaseException:
            calls.abandon(count)
            raise
        finally:
            calls.running -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedForward":
        """Return one for the copy of the module."""
        module = None if self._module is None else self._module()
        return WatchedForward(memo.get(id(module)), self._calls, copy.deepcopy(self._before, memo))

    def __getattr__(self, name: str) -> Any:
        """Look like the forward that was there before."""
        if name.startswith("_") and not name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._find_forward(), name)

    @property
    def __signature__(self) -> inspect.Signature:
        """What `inspect.signature` says of the forward that was there before."""
        return inspect.signature(self._find_forward())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _find_forward(self, module: torch.nn.Module | None = None) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        if module is None:
            module = None if self._module is None else self._module()
        if module is None:
            raise StateError("this forward is of a module that is gone. Call the module and not its forward.")
        for kind in type(module).__mro__:
            if _NAME in vars(kind):
                found = vars(kind)[_NAME]
                bound: Callable[..., Any] = found.__get__(module, type(module)) if hasattr(found, "__get__") else found
                return bound
        raise AttributeError(_NAME)
