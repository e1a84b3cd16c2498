"""Reuses the token counts of a forward in its recompute, so that the host does not wait for them a second time.

A token dispatcher synchronizes on the token counts, because only the device has the sizes of the experts' inputs. Forward
cannot avoid the synchronization. A checkpoint recomputes the forward in backward and sends the same tokens to the same experts,
so the host already has the counts. But Megatron requests them a second time. In backward, the host runs ahead of the device.
Waiting for the counts again ends this lead, so the device may run out of queued kernels.

[Note: Known counts]
So we store the counts of a checkpointed forward, and its recompute uses them at once. The recompute still requests its own
counts, but does not wait for them. When these arrive, we compare them with the stored ones, and raise an error if they differ.
A difference means that the router chose differently in the recompute, so gradients would be wrong even without this reuse.

Only the first dispatcher of a checkpoint reuses counts. Later dispatchers depend on the combine of the experts' outputs. Unless
fused permutation or deterministic algorithms are on, the combine adds with atomics, and a recompute may differ in the last bit.
Then the next router may choose differently. So later dispatchers of a checkpoint synchronize as in Megatron.
"""

import collections
import functools
import importlib.util
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import is_in_backward
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.graphs.graphed_layers import may_query
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.layer_inputs import BLOCK_MODULE, PARALLEL, RECOMPUTE_MODULE

_TE_USERS = ("megatron.core.transformer.moe.moe_layer", BLOCK_MODULE, RECOMPUTE_MODULE)
"""Modules that import Transformer Engine's checkpoint by name, for quantized layers. The last one was added in 0.18."""


class _StoredCounts:
    """Token counts of the first dispatcher in one checkpointed forward, in the order of its requests."""

    def __init__(self) -> None:
        self.counts: list[Any] = []
        """Counts that `maybe_move_tensor_to_cpu` returned. Forward has synchronized on them."""
        self.position: int | None = None
        """Index of the next count in a recompute; None in forward, which is the first call."""
        self.requested: list[tuple[Any, Any]] = []
        """Each known count that this recompute has used since its last wait, paired with the count that it requested."""
        self.is_past_first = False
        """Whether the current forward or recompute is past its first dispatcher."""

    def choose(self, count: Any) -> Any:
        """Return the count for the dispatcher. A recompute gets the known count, because `count` may be in flight."""
        if self.is_past_first:
            return count
        if self.position is None:
            self.counts.append(count)
            return count
        if self.position == len(self.counts):
            raise StateError("A recompute requested more token counts than its forward, so the model has changed since.")
        known = self.counts[self.position]
        self.position += 1
        self.requested.append((known, count))
        return known


class KnownCounts:
    """Reuses the counts of a forward in its recompute, and checks them. See [Note: Known counts]."""

    def __init__(self) -> None:
        self._local = threading.local()  # forward and recompute run on different threads
        self._requested: collections.deque[tuple[Any, list[tuple[Any, Any]]]] = collections.deque()
        """Counts to compare: an event that shows when the requested counts have arrived, and pairs (known, requested)."""

    def wrap(self, patches: Patches) -> None:
        """Wrap Megatron's checkpoints, and the methods with which dispatchers request counts.

        Streams:
            The counts that a recompute requests are copied as in forward, without blocking the host. After they have arrived,
            they are compared at the start of the next checkpointed function.
        """
        wrap_symbol(patches, PARALLEL, "checkpoint", self._checkpoint)
        for user in _TE_USERS:
            # Without Transformer Engine, `te_checkpoint` is None or missing.
            if importlib.util.find_spec(user) is not None and getattr(load_module(user), "te_checkpoint", None) is not None:
                wrap_symbol(patches, user, "te_checkpoint", self._checkpoint)
        wrap_symbol(patches, DISPATCHERS, "maybe_move_tensor_to_cpu", self._move)
        wrap_symbol(patches, f"{DISPATCHERS}:MoEAlltoAllTokenDispatcher", "_maybe_dtoh_and_synchronize", self._wait)

    def _check(self) -> None:
        """Check that recomputes used the token counts of their forward, if the counts have arrived. The host does not block."""
        while self._requested and _is_complete(self._requested[0][0]):
            for known, own in self._requested.popleft()[1]:
                before, again = torch.as_tensor(known), torch.as_tensor(own)
                if not torch.equal(before, again):
                    raise StateError(
                        f"A recompute sent {again.tolist()} tokens to its experts or ranks, but its forward sent "
                        f"{before.tolist()}: the router chose differently the second time, so gradients are wrong. Use "
                        "deterministic router kernels, or do not recompute 'moe' and 'layer'."
                    )

    def _checkpoint(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        # A checkpointed module, such as the shared experts, dispatches no tokens, and Transformer Engine inspects its type.
        if is_in_backward() or not torch.is_grad_enabled() or not may_query() or isinstance(function, torch.nn.Module):
            return original(function, *args, **kwargs)
        return original(self._reuse_counts(function), *args, **kwargs)

    def _reuse_counts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that stores the counts of its first call and uses them in later calls."""
        stored = _StoredCounts()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            outer, self._local.stored = self._find_stored(), stored
            try:
                return function(*args, **kwargs)
            finally:
                self._local.stored = outer
                stored.position, stored.is_past_first = 0, False

        return call

    def _find_stored(self) -> _StoredCounts | None:
        return getattr(self._local, "stored", None)

    def _move(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        count, stored = original(tensor, *args, **kwargs), self._find_stored()
        return count if stored is None or not isinstance(tensor, torch.Tensor) else stored.choose(count)

    def _wait(self, original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
        result, stored = original(dispatcher, *args, **kwargs), self._find_stored()
        if stored is not None and stored.requested:
            # Megatron would wait for this event later, but the host already has the known counts.
            self._requested.append((dispatcher.d2h_event, stored.requested))
            stored.requested = []
            dispatcher.d2h_event = _COMPLETE
        if stored is not None and stored.counts:
            stored.is_past_first = True
        return result


_COMPLETE = types.SimpleNamespace(synchronize=lambda: None)
"""Event that is already complete."""


def _is_complete(event: Any) -> bool:
    # Without a GPU, the event has no `query`, and its work is done when it is queued.
    return bool(event.query()) if isinstance(event, torch.cuda.Event) else True  # type: ignore[no-untyped-call]
