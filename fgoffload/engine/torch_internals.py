"""Imports private functions of torch, and wraps some of them so that code for plain torch works with offload.

[Note: torch.func inside a region]
`torch.func.grad`, `vjp`, `jacrev` and `hessian` disable saved-tensor hooks while they run, and torch raises an error if hooks
are installed. The engine does not need tensors that a transform saves, so the wrapped function raises no error if the innermost
hooks are the engine's. No other hooks can be below them (see [Note: When a region is inert]).

[Note: A gradient that is a saved tensor]
The backward of a custom function may return a saved tensor as a gradient. Autograd reuses this tensor as `.grad` if the
reference count of its object shows no other user. With hooks, torch wraps a saved tensor that requires a gradient in a new
object at each unpack. The count then shows no user, even if a parameter or another gradient shares the storage. Without
`create_graph`, a computed gradient never requires a gradient, so a gradient that does is a saved tensor, and the wrapped
function clones it. Other saved tensors unpack to the same object each time, so their counts are correct. Plain torch returns
the saved object and does not have this problem.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

_autograd: Any = torch._C._autograd  # noqa: SLF001 - none of these has a public name

get_sequence_number: Callable[[], int] = _autograd._get_sequence_nr  # noqa: SLF001
"""Returns the number of autograd nodes that this thread has created. Saves with different numbers belong to different ops."""

peek_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
"""Returns the innermost `torch.func` transform that this thread is in, or None."""

find_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks  # noqa: SLF001
"""Returns the innermost saved-tensor hooks, or None. Pass true to ignore an active tracer."""

push_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
"""Installs a pack and an unpack hook, like `torch.autograd.graph.saved_tensors_hooks` but without a context object."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Removes the hooks that `push_hooks` installed last."""


get_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Returns the id of the backward that this thread is running, or -1 outside backward."""

is_tracing: Callable[[], bool] = torch._C._is_tracing  # noqa: SLF001

find_disabled_message: Callable[[], str | None] = _autograd._saved_tensors_hooks_get_disabled_error_message  # noqa: SLF001
"""Returns why saved-tensor hooks are forbidden here, or None if they are allowed."""

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # noqa: SLF001

count_storage_references: Callable[[int], int] = torch._C._storage_Use_Count  # noqa: SLF001
"""Returns the number of references to the storage at an address. The count for a single tensor depends on torch's version."""

# Typed as `Any`, because torch's annotations are wrong.
make_weak_ref: Any = torch.UntypedStorage._weak_ref  # noqa: SLF001
free_weak_ref: Any = torch.UntypedStorage._free_weak_ref  # noqa: SLF001
is_expired: Any = torch.UntypedStorage._expired  # noqa: SLF001
find_referenced: Any = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001


def skip(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `function` from torch.compile, but not the functions that it calls."""
    from torch._dynamo.decorators import skip as skip_frame  # the import takes a second

    return skip_frame(function)


def find_raw_stream_getter() -> Callable[[int], int] | None:
    """Return torch's function that maps a device index to CUDA's handle of the current stream, or None without CUDA."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


def get_stream(index: int) -> torch.Stream:
    """Return the accelerator's current stream. This is faster than `torch.accelerator.current_stream`."""
    return torch._C._accelerator_getStream(index)  # noqa: SLF001


def is_sanitizer_on() -> bool:
    """Return whether torch's CUDA sanitizer, which finds races between streams, is on."""
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    return sanitizer is not None and sanitizer.cuda_sanitizer.enabled


def sleep_on_device(cycles: int) -> None:
    """Delay the current CUDA stream by `cycles` clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward ends, on the thread that started it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream, if torch was built with CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # noqa: SLF001


def empty_host_cache() -> None:
    """Free the pinned memory that torch's allocator caches, if this version of torch supports it."""
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # noqa: SLF001


def share_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share a version counter. For example, the results of `torch.unsafe_chunk` do not."""
    before, other_version = one._version, other._version  # noqa: SLF001 - no public name
    torch.autograd.graph.increment_version(one)
    shared = other._version != other_version  # noqa: SLF001 - no public name
    _autograd._unsafe_set_version_counter((one,), (before,))  # noqa: SLF001
    return shared


_IS_WRAPPED = "_fgoffload_is_wrapped"


def wrap_internals(is_ours: Callable[[Any], bool]) -> None:
    """Wrap torch's functions (see the notes above), once per process. `is_ours` returns whether a pack hook is the engine's."""
    if not hasattr(_autograd._saved_tensors_hooks_disable, _IS_WRAPPED):  # noqa: SLF001
        _autograd._saved_tensors_hooks_disable = _wrap_disable(_autograd._saved_tensors_hooks_disable, is_ours)  # noqa: SLF001
    for name in ("apply", "apply_boxed"):
        function = getattr(BackwardCFunction, name, None)
        if function is not None and not hasattr(function, _IS_WRAPPED):
            setattr(BackwardCFunction, name, _wrap_apply(function))


def _wrap_disable(disable: Callable[[str, bool], None], is_ours: Callable[[Any], bool]) -> Callable[..., None]:
    @functools.wraps(disable)
    def disable_hooks(error_message: str, fail_if_non_empty: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Disable saved-tensor hooks. See [Note: torch.func inside a region]."""
        if fail_if_non_empty:
            hooks = find_top_hooks(True)  # noqa: FBT003 - ignore an active tracer
            fail_if_non_empty = hooks is None or not is_ours(hooks[0])
        disable(error_message, fail_if_non_empty)

    setattr(disable_hooks, _IS_WRAPPED, True)
    return disable_hooks


def _wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_backward(node: BackwardCFunction, *args: Any) -> Any:
        """Run a custom function's backward and clone saved tensors. See [Note: A gradient that is a saved tensor]."""
        gradients = apply(node, *args)
        if torch.is_grad_enabled():
            return gradients
        if not isinstance(gradients, tuple):
            return _clone_saved(gradients)
        for gradient in gradients:  # faster than `any` with a generator
            if isinstance(gradient, torch.Tensor) and gradient.requires_grad:
                return tuple(map(_clone_saved, gradients))
        return gradients

    setattr(apply_backward, _IS_WRAPPED, True)
    return apply_backward


def _clone_saved(gradient: Any) -> Any:
    return gradient.clone() if isinstance(gradient, torch.Tensor) and gradient.requires_grad else gradient
