"""Reuses the token counts of a forward in its recompute, so that the host does not wait for them again.

A token dispatcher synchronizes on the token counts, since the sizes of the experts' inputs are only on the device. Forward
cannot avoid that. A checkpoint that recomputes the forward in backward sends the same tokens to the same experts, and the host
already has the counts. But Megatron requests them again, and the host, which is ahead of the device in backward, loses its
lead. Kernels after that wait are launched while the device has little work left.

[Note: Known counts]
So the counts of a forward in a checkpoint are stored with it, and its recompute gets them at once. The recompute still requests
its own counts, without waiting. They are compared once they arrive, and a difference raises an error. It means that the router
chose differently in the recompute, so gradients belong to another forward, with or without this reuse.

This covers only the first dispatcher of a checkpoint. Tensors after it have passed the combine of the experts. Without fused
permutation and deterministic algorithms, the combine adds with atomics. A recompute may then differ in the last bit, and with
it the choice of the next router. So if a checkpoint contains several layers, later dispatchers synchronize as in Megatron.
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
"""Modules that import Transformer Engine's checkpoint by name, for quantized layers; the last one since 0.18."""


class _Run:
    """Token counts of the first dispatcher in one checkpointed forward, in order."""

    def __init__(self) -> None:
        self.counts: list[Any] = []
        """Counts as `maybe_move_tensor_to_cpu` returned them. Readers have waited for them in forward."""
        self.position: int | None = None
        """Index of the next count in a recompute; None in forward, which is the first call."""
        self.asked: list[tuple[Any, Any]] = []
        """Known and requested counts of the next wait."""
        self.is_past_first = False
        """Whether this pass is past its first dispatcher."""

    def pass_on(self, count: Any) -> Any:
        """Return the count for the dispatcher: in a recompute, the known one, since `count` may still be in flight."""
        if self.is_past_first:
            return count
        if self.position is None:
            self.counts.append(count)
            return count
        if self.position == len(self.counts):
            raise StateError("A recompute dispatched more tokens than its forward: the model changed in between.")
        known = self.counts[self.position]
        self.position += 1
        self.asked.append((known, count))
        return known


class KnownCounts:
    """Passes the counts of a forward to its recompute, and checks that both are equal. See [Note: Known counts]."""

    def __init__(self) -> None:
        self._local = threading.local()  # forward and recompute run on different threads
        self._asked: collections.deque[tuple[Any, list[tuple[Any, Any]]]] = collections.deque()
        """Events recorded after copies of requested counts, with pairs of known and requested counts."""

    def follow(self, patches: Patches) -> None:
        """Wrap checkpoints, and the methods with which dispatchers request counts in them.

        Streams:
            Counts that a recompute requests are copied as in forward, without blocking the host. Once arrived, they are
            compared when the next function in a checkpoint begins.
        """
        wrap_symbol(patches, PARALLEL, "checkpoint", self._checkpoint)
        for user in _TE_USERS:
            # None or missing without Transformer Engine.
            if importlib.util.find_spec(user) is not None and getattr(load_module(user), "te_checkpoint", None) is not None:
                wrap_symbol(patches, user, "te_checkpoint", self._checkpoint)
        wrap_symbol(patches, DISPATCHERS, "maybe_move_tensor_to_cpu", self._move)
        wrap_symbol(patches, f"{DISPATCHERS}:MoEAlltoAllTokenDispatcher", "_maybe_dtoh_and_synchronize", self._wait)

    def _check(self) -> None:
        """Compare the counts that have arrived since the last call. The host does not block."""
        while self._asked and _has_passed(self._asked[0][0]):
            for known, own in self._asked.popleft()[1]:
                before, again = torch.as_tensor(known), torch.as_tensor(own)
                if not torch.equal(before, again):
                    raise StateError(
                        f"A recompute sent {again.tolist()} tokens to its experts or ranks, its forward {before.tolist()}: the "
                        "router chose differently the second time, so gradients are wrong. Use deterministic router kernels, "
                        "or do not recompute 'moe' and 'layer'."
                    )

    def _checkpoint(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        # A module, such as the shared experts, dispatches nothing. It is not wrapped, since Transformer Engine inspects it.
        if is_in_backward() or not torch.is_grad_enabled() or not may_query() or isinstance(function, torch.nn.Module):
            return original(function, *args, **kwargs)
        return original(self._remember(function), *args, **kwargs)

    def _remember(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that passes the counts of its first call to each later call."""
        run = _Run()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            before, self._local.run = self._find_run(), run
            try:
                return function(*args, **kwargs)
            finally:
                self._local.run = before
                run.position, run.is_past_first = 0, False

        return call

    def _find_run(self) -> _Run | None:
        return getattr(self._local, "run", None)

    def _move(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        count, run = original(tensor, *args, **kwargs), self._find_run()
        return count if run is None or not isinstance(tensor, torch.Tensor) else run.pass_on(count)

    def _wait(self, original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
        result, run = original(dispatcher, *args, **kwargs), self._find_run()
        if run is not None and run.asked:
            # The host would wait for this event later, although the known counts suffice.
            self._asked.append((dispatcher.d2h_event, run.asked))
            run.asked = []
            dispatcher.d2h_event = _PASSED
        if run is not None and run.counts:
            run.is_past_first = True
        return result


_PASSED = types.SimpleNamespace(synchronize=lambda: None)
"""An event that the host need not wait for."""


def _has_passed(event: Any) -> bool:
    # The CPU's stand-in for an event cannot be queried. Its work is done once queued.
    return bool(event.query()) if isinstance(event, torch.cuda.Event) else True  # type: ignore[no-untyped-call]
