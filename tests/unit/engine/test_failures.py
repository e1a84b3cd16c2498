"""Tests the state after an exception: no hooks, no host memory in use, and a correct next step."""

import functools
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from support.failing import OPERATIONS, FailingCpuDevice, fail_to_pin, make_out_of_memory_error
from support.sites import DelayedCpuDevice, Sites, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, Device, OffloadEngine

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
NBYTES = 32 * 32 * 4
HOST_BUDGET_BYTES = 64 * NBYTES
"""The arena allocates all of it as one slab."""


class Model:
    """Saves whole storages, one of them in two regions, and columns of a storage, which are gathered."""

    def __init__(self) -> None:
        self.x, self.w = leaf(32, 32), leaf(32, 32, seed=1)
        self.leaves = (self.x, self.w)

    def __call__(self, sites: Sites, *, act: Callable[[torch.Tensor], torch.Tensor] = torch.exp) -> torch.Tensor:
        h = self.x * 2
        with sites.watched():
            normed = sites(lambda h: h.softmax(-1), h, tag="attn_norm")
            h = h + sites(lambda n: n @ self.w, normed, tag="qkv_linear")
            columns = sites(lambda h: h[:, ::4].sin().repeat(1, 4), h, tag="core_attn")
            return sites(lambda h: act(sites(torch.tanh, h, tag="moe_act")), h + columns, tag="mlp_norm")


def run_step(model: Model, engine: OffloadEngine | None, **options) -> list[torch.Tensor]:
    """Return the gradients of two microbatches that are in flight together."""
    outputs = [model(Sites(engine, microbatch=index), **options) for index in range(2)]
    gradients = []
    for output in outputs:
        gradients += torch.autograd.grad(output.sum(), model.leaves)
    return gradients


@functools.cache
def get_expected() -> list[torch.Tensor]:
    return run_step(Model(), None)


def make_small_engine(device: Device) -> OffloadEngine:
    policy = TransferPolicy(window_bytes=2 * NBYTES, prefetch_bytes=NBYTES)
    return make_engine(device, policy=policy, host_budget_bytes=HOST_BUDGET_BYTES)


@functools.cache
def count_offloaded_bytes(make_device: Callable[[], Device]) -> int:
    engine = make_small_engine(make_device())
    run_step(Model(), engine)
    return engine.finish_step().d2h_bytes


def check_no_traces(engine: OffloadEngine, make_device: Callable[[], Device]) -> None:
    """Check that a step that raised leaked nothing, and that the next step equals the first step of a new engine."""
    assert not has_hooks()
    gc.collect()  # an exception and its frames are a reference cycle that keeps the graph alive
    assert engine.arena.used_bytes == 0
    assert engine.arena.find_block(HOST_BUDGET_BYTES) or not engine.arena.reserved_bytes  # no range is lost
    engine.finish_step()
    assert_same_bits(get_expected(), run_step(Model(), engine))
    stats = engine.finish_step()
    assert stats.d2h_bytes == count_offloaded_bytes(make_device)
    assert engine.arena.used_bytes == 0
    engine.close()
    assert engine.arena.reserved_bytes == 0


def raise_in(run: Callable[[], object], kind: type[BaseException]) -> bool:
    """Return whether `run` raises `kind`; `pytest.raises` would keep the exception, and with it the graph, alive."""
    try:
        run()
    except kind:
        return True
    return False


MakeError = Callable[[], BaseException]
"""Raising the same exception twice would keep the frames, and with them the graph, of the first time alive."""


class RaiseInBackward(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, tensor, make_error):
        ctx.make_error = make_error
        return tensor.exp()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.make_error()


def raise_in_forward(make_error: MakeError) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(h: torch.Tensor) -> torch.Tensor:
        h.sin()
        raise make_error()

    return act


def raise_in_backward(make_error: MakeError) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: RaiseInBackward.apply(h, make_error)


def raise_in_tensor_hook(make_error: MakeError) -> Callable[[torch.Tensor], torch.Tensor]:
    def fail(gradient: torch.Tensor) -> None:
        raise make_error()

    def act(h: torch.Tensor) -> torch.Tensor:
        output = h.exp()
        output.register_hook(fail)
        return output

    return act


PLACES = {"forward": raise_in_forward, "backward": raise_in_backward, "tensor hook": raise_in_tensor_hook}


@DEVICES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_after_an_exception_in_user_code_nothing_leaks_and_the_next_step_is_correct(kind, place, make_device):
    engine = make_small_engine(make_device())
    act = PLACES[place](lambda: kind("user error"))
    assert raise_in(lambda: run_step(Model(), engine, act=act), kind)
    check_no_traces(engine, make_device)


def interrupt() -> KeyboardInterrupt:
    return KeyboardInterrupt("Ctrl-C")


FAILURES = [(operation, interrupt) for operation in OPERATIONS]
FAILURES += [("allocate_device", make_out_of_memory_error), ("allocate_host", fail_to_pin)]
EACH_FAILURE = pytest.mark.parametrize(
    ("operation", "make_error"), FAILURES, ids=[f"{operation}-{make_error.__name__}" for operation, make_error in FAILURES]
)


def fail_each_call(operation: str, make_error: MakeError, run: Callable[[OffloadEngine], object]) -> None:
    """Make each call of `operation` in `run` raise in turn, with a new engine each time."""
    for call in itertools.count(1):
        device = FailingCpuDevice()
        engine = make_small_engine(device)
        if operation != "allocate_host":  # called only in the first step
            run_step(Model(), engine)  # so that host blocks are reused
        device.fail(operation, call=call, make_error=make_error)
        run(engine)
        was_raised = device.stop_failing()
        device.finish_copies()
        assert device.lost_destinations == 0
        check_no_traces(engine, DelayedCpuDevice)
        if not was_raised:
            break
    assert call > 1


@EACH_FAILURE
def test_after_an_exception_in_any_device_call_nothing_leaks_and_the_next_step_is_correct(operation, make_error):
    kind = type(make_error())
    fail_each_call(operation, make_error, lambda engine: raise_in(lambda: run_step(Model(), engine), kind))
