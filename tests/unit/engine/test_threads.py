"""Tests two threads in one process that train with a shared engine or one engine each."""

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import TransferPolicy
from fgoffload.engine import CpuDevice, OffloadEngine

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
STEPS = 4
MICROBATCHES = 3
SIZE = 48
NBYTES = SIZE * SIZE * 4


class SerialCopyDevice(CpuDevice):
    """Fails if two threads queue copies at the same time."""

    is_copying = False

    def copy_bytes(self, **names):
        assert not self.is_copying
        self.is_copying = True
        time.sleep(1e-4)  # lets another thread run
        super().copy_bytes(**names)
        self.is_copying = False


class Training:
    """Trains a model that depends on `seed`; all its saved tensors go through the engine."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.weights = [torch.nn.Parameter(leaf(SIZE, SIZE, seed=100 * seed + n).detach() / 7) for n in range(3)]

    def forward(self, engine: OffloadEngine | None, microbatch: int) -> torch.Tensor:
        sites = Sites(engine, microbatch=microbatch)
        h = leaf(SIZE, SIZE, seed=1000 * self.seed + microbatch).detach()
        with sites.watched():
            for weight in self.weights:
                h = h + sites(lambda h, weight=weight: torch.tanh(h @ weight) * h.t(), h, tag="mlp_norm")
                h = sites(lambda h: h[:, ::4].sin().repeat(1, 4) * h, h, tag="core_attn")
        return h.square().mean()

    def step(self, engine: OffloadEngine | None) -> None:
        losses = [self.forward(engine, microbatch) for microbatch in range(MICROBATCHES)]
        for loss in losses:
            loss.backward()
        self.update()

    def update(self) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.sub_(0.5 * weight.grad)
                weight.grad = None

    def train(self, engine: OffloadEngine | None) -> list[torch.Tensor]:
        for _ in range(STEPS):
            self.step(engine)
        return [weight.detach() for weight in self.weights]


def make_tight_engine(make_device: Callable, threads: int) -> OffloadEngine:
    """Return an engine with a small window and a small host budget, so that copies reuse host blocks."""
    policy = TransferPolicy(window_bytes=3 * NBYTES, prefetch_bytes=2 * NBYTES)
    return make_engine(make_device(), policy=policy, host_budget_bytes=threads * 20 * NBYTES)


@pytest.fixture
def _short_switch_interval():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds; in the default 5 ms a whole step would run uninterrupted
    yield
    sys.setswitchinterval(interval)


def run_together(functions: list[Callable[[], object]]) -> None:
    """Run each function on a thread, all started together, and raise the first error."""
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            barrier.wait(timeout=30)
            function()
            assert not has_hooks()
        except BaseException as error:  # noqa: BLE001 - raised again below, on the thread of the test
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def train_together(engines: list[OffloadEngine]) -> None:
    """Train one model per engine, each on its own thread, and check that all are bitwise identical."""
    expected = [Training(seed).train(None) for seed in range(len(engines))]
    found: dict[int, list[torch.Tensor]] = {}
    in_step = threading.Barrier(len(engines))

    def train(seed: int) -> None:
        training = Training(seed)
        for _ in range(STEPS):
            in_step.wait(timeout=30)  # makes the steps overlap, regardless of scheduling
            training.step(engines[seed])
        found[seed] = [weight.detach() for weight in training.weights]

    run_together([lambda seed=seed: train(seed) for seed in range(len(engines))])
    for seed, weights in enumerate(expected):
        assert_same_bits(weights, found[seed])


@pytest.mark.usefixtures("_short_switch_interval")
@pytest.mark.parametrize("make_device", [SerialCopyDevice, DelayedCpuDevice])
@pytest.mark.parametrize("is_shared", [True, False], ids=["one engine", "one engine each"])
def test_training_on_two_threads_is_bitwise_identical_to_one_thread_without_offload(is_shared, make_device):
    engines = [make_tight_engine(make_device, threads=1 + is_shared) for _ in range(1 if is_shared else 2)]
    train_together(engines * 2 if is_shared else engines)
    for engine in engines:
        stats = engine.finish_step()
        assert stats.tags["mlp_norm"].groups == (1 + is_shared) * STEPS * MICROBATCHES * 3
        assert stats.d2h_bytes > 0
        assert engine.arena.used_bytes == 0
        engine.close()


@pytest.mark.usefixtures("_short_switch_interval")
@DEVICES
def test_forward_and_backward_on_two_threads_at_once_are_bitwise_identical(make_device):
    training = Training(0)
    expected = [torch.autograd.grad(training.forward(None, index), training.weights) for index in range(8)]
    engine = make_tight_engine(make_device, threads=2)
    found: list[tuple[torch.Tensor, ...]] = []
    losses: list[torch.Tensor] = [training.forward(engine, 0)]
    for index in range(8):
        loss, following = losses.pop(), []

        def run_forward(index: int = index, following: list = following) -> None:
            if index < 7:
                following.append(training.forward(engine, index + 1))

        def run_backward(loss: torch.Tensor = loss) -> None:
            found.append(torch.autograd.grad(loss, training.weights))

        run_together([run_forward, run_backward])
        losses = following
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one, other)
    engine.close()


@pytest.mark.usefixtures("_short_switch_interval")
def test_graphs_dropped_on_one_thread_while_another_trains_release_their_memory():
    engine = make_tight_engine(DelayedCpuDevice, threads=2)
    expected = Training(0).train(None)
    found: list[list[torch.Tensor]] = []
    is_over = threading.Event()

    def train() -> None:
        found.append(Training(0).train(engine))
        is_over.set()

    def drop() -> None:
        dropped = Training(1)
        for index in itertools.count():
            dropped.forward(engine, index % 4)
            if is_over.is_set():
                return

    run_together([train, drop])
    assert_same_bits(expected, found[0])
    assert engine.arena.used_bytes == 0
    engine.close()


@pytest.mark.usefixtures("_short_switch_interval")
def test_repeated_exceptions_on_one_thread_do_not_change_results_on_another():
    engine = make_tight_engine(CpuDevice, threads=2)
    expected = Training(0).train(None)
    found: list[list[torch.Tensor]] = []

    def fail(h: torch.Tensor) -> torch.Tensor:
        h.sin()
        raise ValueError("user error")

    def raise_repeatedly() -> None:
        x = leaf(SIZE, SIZE)
        for _ in range(100):
            sites = Sites(engine)
            try:
                sites(fail, sites(torch.sin, x * 2))
            except ValueError:
                continue

    run_together([lambda: found.append(Training(0).train(engine)), raise_repeatedly])
    assert_same_bits(expected, found[0])
    gc.collect()
    assert engine.arena.used_bytes == 0
    engine.close()
