"""What a recompute knows from its forward: how many tokens each expert gets, so that the host need not wait for it again.

A token dispatcher has the host wait for the device, since the sizes of what the experts compute are on the device alone. In
forward there is no way around it. Where a checkpoint runs the same forward again in backward, the same tokens go to the same
experts, and the host has the counts already; but Megatron asks for them again, and the host, which is ahead of the device in
backward, falls back to where the device is. Each kernel behind that wait is launched while the device has little left to do.

[Note: Known counts]
So the counts of a forward under a checkpoint are remembered with it, and its recompute is given those at once. It asks for its
own all the same, without a wait: when these have come they are compared, and where they differ that is an error. Then the
router chose otherwise the second time, and gradients are those of another forward, with or without this.

That holds for the first dispatcher of a checkpoint alone. What is behind it has passed the combine of the experts, which adds
with atomics where permutation is not fused and algorithms need not be deterministic: a recompute may differ there in a last
bit, and the next router with it. So where one checkpoint is around several layers, the others ask as Megatron has them ask.
"""

import collections
import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class _Asked(NamedTuple):
    """One recompute's own counts, which are on their way."""

    event: Any
    """Behind them."""
    pairs: tuple[tuple[Any, Any], ...]
    """What is known, and what comes."""


class _Run:
    """The counts of the first dispatcher in one forward under a checkpoint, in order."""

    def __init__(self) -> None:
        self.counts: list[Any] = []
        """As `maybe_move_tensor_to_cpu` returned them. Whoever reads them has waited for them in forward."""
        self.position: int | None = None
        """Of the next one in a recompute; None in forward."""
        self.asked: list[tuple[Any, Any]] = []
        """Of the wait that comes next: what is known, and what comes."""
        self.is_past_first = False
        """Whether this pass has come past its first dispatcher."""

    def pass_on(self, count: Any) -> Any:
        """Return what the dispatcher is given in place of `count`, which may still be on its way."""
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
    """Gives recomputes the counts of their forward, and checks that they are the same. See [Note: Known counts]."""

    def __init__(self) -> None:
        self._local = threading.local()  # forward and recompute are on threads of their own
        self._asked: collections.deque[_Asked] = collections.deque()

    def follow(self, patches: Patches) -> None:
        """Wrap checkpoints, and what dispatchers ask in them.

        Streams:
            What a recompute asks for is copied as in forward, and the host does not block for it. Where it has come is looked
            at when a function under a checkpoint begins the next time.

        Raises:
            IntegrationError: Megatron-Core lacks one of the symbols.
        """
        wrap_symbol(patches, PARALLEL, "checkpoint", self._wrap_checkpoint)
        for user in _TE_USERS:
            # None, or absent, without Transformer Engine.
            if importlib.util.find_spec(user) is not None and getattr(load_module(user), "te_checkpoint", None) is not None:
                wrap_symbol(patches, user, "te_checkpoint", self._wrap_checkpoint)
        wrap_symbol(patches, DISPATCHERS, "maybe_move_tensor_to_cpu", self._wrap_move)
        wrap_symbol(patches, f"{DISPATCHERS}:MoEAlltoAllTokenDispatcher", "_maybe_dtoh_and_synchronize", self._wrap_wait)

    def _check(self) -> None:
        """Compare the counts that have come since the last time. The host does not block.

        Raises:
            StateError: A recompute sent other tokens to an expert than its forward.
        """
        while self._asked and _has_passed(self._asked[0].event):
            for known, own in self._asked.popleft().pairs:
                _check_alike(known, own)

    def _wrap_checkpoint(self, original: Any) -> Any:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            # A module, as the shared experts, dispatches nothing; Transformer Engine looks into modules it is given.
            if is_in_backward() or not torch.is_grad_enabled() or not may_query() or isinstance(function, torch.nn.Module):
                return original(function, *args, **kwargs)
            return original(self._remember(function), *args, **kwargs)

        return checkpoint

    def _remember(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which gets in each later call the counts of its first one."""
        run = _Run()
        is_first = True

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            self._check()
            run.position, run.is_past_first = None if is_first else 0, False
            is_first = False
            with self._inside(run):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _inside(self, run: _Run) -> Iterator[None]:
        before = self._find_run()
        self._local.run = run
        try:
            yield
        finally:
            self._local.run = before

    def _find_run(self) -> _Run | None:
        return getattr(self._local, "run", None)

    def _wrap_move(self, original: Any) -> Any:
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            count, run = original(tensor, *args, **kwargs), self._find_run()
            return count if run is None or not isinstance(tensor, torch.Tensor) else run.pass_on(count)

        return move

    def _wrap_wait(self, original: Any) -> Any:
        def wait(dispatcher: Any, point: str, *args: Any, **kwargs: Any) -> Any:
            result, run = original(dispatcher, point, *args, **kwargs), self._find_run()
            if run is not None and run.asked:
                # The host waits for this event at a later point, which it comes to with what it knows.
                self._asked.append(_Asked(dispatcher.d2h_event, tuple(run.asked)))
                run.asked.clear()
                dispatcher.d2h_event = _PASSED
            if run is not None and run.counts:
                run.is_past_first = True
            return result

        return wait


class _PassedEvent:
    """An event that the host need not wait for."""

    def synchronize(self) -> None:
        """Return at once."""


_PASSED = _PassedEvent()


def _has_passed(event: Any) -> bool:
    # What stands for one on a CPU cannot be asked: what was queued there is done.
    return bool(event.query()) if isinstance(event, torch.cuda.Event) else True  # type: ignore[no-untyped-call]


def _check_alike(known: Any, own: Any) -> None:
    before, again = torch.as_tensor(known), torch.as_tensor(own)
    if not torch.equal(before, again):
        raise StateError(
            f"A recompute sent {again.tolist()} tokens to its experts or ranks, its forward {before.tolist()}: the router "
            "chose otherwise the second time, so gradients are wrong. Use deterministic router kernels, or do not recompute "
            "'moe' and 'layer'."
        )
