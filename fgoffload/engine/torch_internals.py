"""Private functions of torch, and two of them wrapped, so that offload changes nothing that plain torch allows.

[Note: torch.func inside a region]
`torch.func.grad`, `vjp`, `jacrev` and `hessian` switch saved-tensor hooks off while they run, and torch raises where hooks are
already installed. Ours need not see what a transform saves, so they may be switched off: the wrapped function no longer asks
for an empty stack where our hooks are on top of it. Nobody else's can lie below them, see [Note: When a region is inert].

[Note: A gradient that is a saved tensor]
A backward may return a tensor that it saved. Autograd takes such a tensor over as `.grad` where nobody else refers to it, which
it decides by the reference count of the tensor object. Under hooks torch wraps a saved tensor that requires a gradient in a new
object each time it is taken, so the count says "unused" although a parameter, or another gradient, has the same storage. A
gradient that a custom function computes without `create_graph` never requires a gradient itself, so one that does is a saved
tensor: it is cloned. Saved tensors that require no gradient are handed back as the object that was saved, or as one object for
all who take it, and the count is right. Plain torch has neither problem, since it hands back the saved object itself.
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
"""Returns how many autograd nodes this thread has made: two saves with different numbers are of different ops."""

peek_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
"""Returns the innermost `torch.func` transform that this thread is in, or None."""

find_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks  # noqa: SLF001
"""Returns the innermost saved-tensor hooks, or None; the argument says whether to ignore that a tracer is at work."""

push_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
"""Begins to call a pack and an unpack hook, as `torch.autograd.graph.saved_tensors_hooks` does, without an object more."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Ends what `push_hooks` began last."""


get_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Returns the number of the backward that this thread runs a node of, or -1."""

is_tracing: Callable[[], bool] = torch._C._is_tracing  # noqa: SLF001

find_forbidding_message: Callable[[], str | None] = _autograd._saved_tensors_hooks_get_disabled_error_message  # noqa: SLF001
"""Returns why nobody may install saved-tensor hooks now, or None where one may."""

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # noqa: SLF001

count_storage_references: Callable[[int], int] = torch._C._storage_Use_Count  # noqa: SLF001
"""Returns how many references there are to the storage with an address; how many one tensor has differs by version."""

# Their annotations in torch are of something else.
make_weak_ref: Any = torch.UntypedStorage._weak_ref  # noqa: SLF001
free_weak_ref: Any = torch.UntypedStorage._free_weak_ref  # noqa: SLF001
is_expired: Any = torch.UntypedStorage._expired  # noqa: SLF001
find_referenced: Any = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001


def skip(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of `function`, and not out of what it calls."""
    from torch._dynamo.decorators import skip as skip_frame  # here: it takes a second, and only plain PyTorch needs it

    return skip_frame(function)


def find_raw_stream_getter() -> Callable[[int], int] | None:
    """Return what gives the driver's address of the current CUDA stream by device index; None where torch has no CUDA."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


def get_stream(index: int) -> torch.Stream:
    """Return the current stream of the accelerator with an index: `torch.accelerator.current_stream` makes two calls more."""
    return torch._C._accelerator_getStream(index)  # noqa: SLF001


def is_sanitizer_on() -> bool:
    """Return whether torch's CUDA sanitizer looks for races between streams."""
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    return sanitizer is not None and sanitizer.cuda_sanitizer.enabled


def sleep_on_device(cycles: int) -> None:
    """Have the current CUDA stream do nothing for so many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


def queue_after_backward(act: Callable[[], None]) -> None:
    """Call `act` when the backward that runs is through, on the thread that called it."""
    torch.autograd.Variable._execution_engine.queue_callback(act)  # noqa: SLF001


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream, where torch has CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # noqa: SLF001


def empty_host_cache() -> None:
    """Free the pinned memory that torch's allocator keeps, where this version of torch can."""
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # noqa: SLF001


def share_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether changes in place of one tensor count for the other: not for pieces of `torch.unsafe_chunk`, for one."""
    before, of_other = one._version, other._version  # noqa: SLF001 - the only name
    torch.autograd.graph.increment_version(one)
    shared = other._version != of_other  # noqa: SLF001 - the only name
    _autograd._unsafe_set_version_counter((one,), (before,))  # noqa: SLF001
    return shared


_IS_WRAPPED = "_fgoffload_is_wrapped"


def wrap_internals(is_ours: Callable[[Any], bool]) -> None:
    """Wrap both functions, once for the process.

    Args:
        is_ours: Whether a pack hook is the engine's.
    """
    if not hasattr(_autograd._saved_tensors_hooks_disable, _IS_WRAPPED):  # noqa: SLF001
        _autograd._saved_tensors_hooks_disable = _let_ours_be_disabled(_autograd._saved_tensors_hooks_disable, is_ours)  # noqa: SLF001
    for name in ("apply", "apply_boxed"):
        function = getattr(BackwardCFunction, name, None)
        if function is not None and not hasattr(function, _IS_WRAPPED):
            setattr(BackwardCFunction, name, _clone_saved_tensors(function))


def _let_ours_be_disabled(disable: Callable[[str, bool], None], is_ours: Callable[[Any], bool]) -> Callable[..., None]:
    @functools.wraps(disable)
    def disable_hooks(error_message: str, fail_if_non_empty: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch calls it
        """Disable saved-tensor hooks. See [Note: torch.func inside a region]."""
        if fail_if_non_empty:
            hooks = find_top_hooks(True)  # noqa: FBT003 - while tracing too
            fail_if_non_empty = hooks is None or not is_ours(hooks[0])
        disable(error_message, fail_if_non_empty)

    setattr(disable_hooks, _IS_WRAPPED, True)
    return disable_hooks


def _clone_saved_tensors(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_backward(node: BackwardCFunction, *args: Any) -> Any:
        """Run a custom function's backward. See [Note: A gradient that is a saved tensor]."""
        gradients = apply(node, *args)
        if torch.is_grad_enabled():
            return gradients
        if not isinstance(gradients, tuple):
            return _clone_saved(gradients)
        for gradient in gradients:  # dozens from a graph of a layer: a generator takes the host several times as long
            if isinstance(gradient, torch.Tensor) and gradient.requires_grad:
                return tuple(map(_clone_saved, gradients))
        return gradients

    setattr(apply_backward, _IS_WRAPPED, True)
    return apply_backward


def _clone_saved(gradient: Any) -> Any:
    return gradient.clone() if isinstance(gradient, torch.Tensor) and gradient.requires_grad else gradient
