"""Tests that memory does not grow over many steps, without Python's garbage collector.

Resident bytes reveal leaked tensors. Counts of garbage-collected objects reveal leaked graphs, handles and cycles.
"""

import array
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, make_engine

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, KeptReason, OffloadEngine

N = 128
NBYTES = N * N * 4
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
"""A function of the GNU C library; others may keep more of the freed memory."""


@pytest.fixture(autouse=True)
def _disable_gc():
    gc.disable()
    yield
    gc.enable()


def get_resident_bytes() -> int:
    TRIM(0)  # returns freed memory to the system
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_flat(run_step: Callable[[int], object], *, steps: int) -> None:
    """Check that the peaks of objects and resident bytes in the last 40% of the steps do not exceed those of the 40% before.

    Peaks, since some tables are cleared only occasionally. This detects a leak of one tensor in 8 steps or one object in 10.
    Resident bytes include the rest of the process, which may grow once, so a leak must show in a second measurement too.
    """
    span = steps * 4 // 10
    objects, resident_bytes = measure(run_step, steps=steps)
    if get_growth(resident_bytes) >= span * NBYTES // 8:
        objects, resident_bytes = measure(run_step, steps=steps)
    assert get_growth(objects) < span // 10
    assert get_growth(resident_bytes) < span * NBYTES // 8


def measure(run_step: Callable[[int], object], *, steps: int) -> tuple[array.array, array.array]:
    """Return the number of objects after each step, and the resident bytes after about 100 of the steps."""
    every = max(1, steps // 100)
    objects = array.array("q", [0]) * steps  # allocates no object per number
    resident_bytes = array.array("q", [0]) * (steps // every)
    for step in range(steps):
        run_step(step)
        objects[step] = len(gc.get_objects())
        if step % every == every - 1:
            resident_bytes[step // every] = get_resident_bytes()
    return objects, resident_bytes


def get_growth(numbers: array.array) -> int:
    span = len(numbers) * 4 // 10
    return max(numbers[-span:]) - max(numbers[-2 * span : -span])


class UserError(Exception):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise UserError


class Program:
    """Four groups: whole storages, a saved output, and a storage that two groups share. Some steps raise an exception."""

    is_held = False
    is_gathered = False
    backwards = 1

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.w = torch.nn.Parameter(torch.randn(N, N, generator=torch.Generator().manual_seed(0)) / 16)

    def get_input(self) -> torch.Tensor:
        return self.w  # a leaf, which outlives the graph; its mark must not

    def act(self, h: torch.Tensor) -> torch.Tensor:
        return h[:, ::4].sin().repeat(1, 4) if self.is_gathered else h.sin() * h.exp()

    def forward(self, sites: Sites, fail: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with sites.watched():
            h = sites(lambda w: w.sin(), self.get_input(), tag="qkv_linear", is_held=self.is_held)
            h = sites(lambda h: h.softmax(-1), h, tag="core_attn", is_held=self.is_held)
            h = sites(lambda h: h @ self.w, h, tag="attn_proj", is_held=self.is_held)
            h = sites(lambda h: fail(self.act(h)), h, tag="mlp_norm", is_held=self.is_held)
        if self.is_held:
            self.engine.flush()
        return h.sum()

    def run_step(self, step: int) -> None:
        self.w.grad = None
        fail = {3: self.raise_in_forward, 7: RaiseInBackward.apply}.get(step % 10, lambda h: h)
        try:
            output = self.forward(Sites(self.engine), fail)
            for remaining in reversed(range(self.backwards)):
                output.backward(retain_graph=remaining > 0)
        except UserError:
            assert step % 10 in (3, 7)
        else:
            assert step % 10 not in (3, 7) or self.backwards == 0

    @staticmethod
    def raise_in_forward(h: torch.Tensor) -> torch.Tensor:
        raise UserError


class Held(Program):
    is_held = True


class Gathered(Program):
    is_gathered = True


class Retained(Program):
    backwards = 2


class Dropped(Program):
    """No backward: the graph is dropped."""

    backwards = 0

    def get_input(self) -> torch.Tensor:
        return self.w * 2


KINDS = {
    "copies in flight": (Program, {"policy": TransferPolicy(window_bytes=5 * NBYTES, prefetch_bytes=NBYTES)}, {None}),
    "beyond the host budget": (Program, {"host_budget_bytes": NBYTES}, {None, KeptReason.HOST_BUDGET}),
    "gathered": (Gathered, {}, {None}),
    "held and flushed": (Held, {}, {None}),
    "retained": (Retained, {}, {None}),
    "dropped": (Dropped, {}, {None}),
}


def check_kind(kind: str, device: CpuDevice, *, steps: int) -> None:
    make_program, options, expected = KINDS[kind]
    engine = make_engine(device, **options)
    program = make_program(engine)
    found = set()

    def run_step(step: int) -> None:
        program.run_step(step)
        assert engine.arena.used_bytes == 0
        stats = engine.finish_step()
        found.update(KeptReason(name) for tag in stats.tags.values() for name in tag.kept_bytes)
        if stats.d2h_bytes:
            found.add(None)

    check_flat(run_step, steps=steps)
    assert found == expected
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_over_100_steps(kind):
    check_kind(kind, DelayedCpuDevice(), steps=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_over_1000_steps(kind, make_device):
    check_kind(kind, make_device(), steps=1000)


def test_keep_marks_of_freed_storages_do_not_accumulate():
    engine = make_engine()
    check_flat(lambda step: engine.keep([torch.ones(N, N) for _ in range(150)]), steps=100)
    engine.close()


def test_records_of_storages_referenced_elsewhere_do_not_accumulate():
    engine = make_engine()

    def run_step(step: int) -> None:
        held = [torch.ones(4, 4, requires_grad=True) * 2 for _ in range(40)]
        sites = Sites(engine)
        loss = sum(sites(torch.sin, h).sum() for h in held)
        loss.backward()  # all reloaded storages are still referenced, in each step by other tensors

    check_flat(run_step, steps=100)
    engine.close()
