"""Tests exceptions raised at each line of our code: no hook remains, no memory leaks, and the next step is correct."""

import contextlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import ALL, check_equal, copy_gradients, make_inputs, make_net
from support.sites import has_hooks
from torch import nn

import fgoffload

Line = tuple[str, int]


class Interrupt(BaseException):
    """Raised at a line, like Ctrl-C."""


class LineTracer:
    """Records the executed lines of our code, and raises when it first reaches the line `at`."""

    def __init__(self, at: Line | None = None) -> None:
        self.seen: dict[Line, None] = {}
        self._at = at

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> "Callable[..., Any] | None":
        name = frame.f_code.co_filename
        if "/fgoffload/integrations/pytorch/" in name or "/fgoffload/engine/" in name:
            return self._trace_line
        return None

    def _trace_line(self, frame: types.FrameType, event: str, argument: Any) -> "Callable[..., Any]":
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in self.seen:
            self.seen[line] = None
            if line == self._at:
                raise Interrupt
        return self._trace_line

    def run(self, step: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        threading.settrace(self)  # backward may run on another thread
        try:
            step()
        finally:
            sys.settrace(before)
            threading.settrace(None)


def make_step(kind: str) -> tuple[nn.Module, Any, Callable[[], None]]:
    net, inputs = make_net(layers=1), make_inputs(rows=2)

    def run_model() -> None:
        net(inputs).backward()

    def run_parts() -> None:
        with handle.forward():
            loss = net.layers[0](inputs).sum()
        loss.backward()

    def run_block() -> None:
        with handle, fgoffload.region(inputs, "placed"):
            loss = net(inputs)
        loss.backward()

    def run_failing() -> None:
        with contextlib.suppress(RuntimeError):
            net.layers[0].mlp(torch.ones(2, 3))
        assert not has_hooks()
        run_model()

    if kind == "block":
        handle = fgoffload.saved_tensors(ALL, group_bytes=2000, device="cpu")
        return net, handle, run_block
    handle = fgoffload.offload(net, {"layers.*.attn": "attn", "layers.*.mlp": "mlp"}, ALL)
    return net, handle, {"model": run_model, "parts": run_parts, "failing": run_failing}[kind]


def is_unguarded(line: Line) -> bool:
    """Return whether `line` is after all of `__enter__` or before all of `__exit__`, where no `try` is possible."""
    with open(line[0]) as source:
        text = source.read().splitlines()[line[1] - 1].strip()
    return line[0].endswith("/block.py") and text in ("return self", UNGUARDED_EXIT, "forward = self._entries.open[-1]", "try:")


def watch_unraisable(monkeypatch: pytest.MonkeyPatch) -> set[type[BaseException]]:
    """Collect only the types of exceptions in `__del__`, since pytest's own hook keeps the dropped objects alive."""
    found: set[type[BaseException]] = set()
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: found.add(raised.exc_type))
    return found


UNGUARDED_EXIT = "self._exit(is_failed=error is not None)"


@pytest.mark.parametrize("kind", ["model", "parts", "failing", "block"])
def test_after_an_interrupt_at_any_line_nothing_leaks_and_the_next_step_is_correct(kind, monkeypatch):
    unraisable = watch_unraisable(monkeypatch)
    net, handle, step = make_step(kind)
    step()
    expected = copy_gradients(net)
    lines = LineTracer()
    lines.run(step)
    assert len(lines.seen) > 300
    for line in lines.seen:
        if is_unguarded(line):
            continue
        net.zero_grad(set_to_none=True)
        with contextlib.suppress(Interrupt):
            LineTracer(line).run(step)
        assert not has_hooks(), line
        assert unraisable <= {Interrupt}, line
        net.zero_grad(set_to_none=True)
        step()
        check_equal(expected, copy_gradients(net))
        handle.engine.poll()
        assert handle.engine.arena.used_bytes == 0, line
        assert not handle.engine.is_copying_out(), line
        assert not has_hooks(), line
