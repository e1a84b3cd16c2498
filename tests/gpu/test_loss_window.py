"""Tests that groups outside the loss window are freed before the loss, even if the host is far ahead."""

import pytest
import torch
from support.chain import make_weights, take_gradients
from support.sites import Sites

from fgoffload import TransferPolicy
from fgoffload.engine import AcceleratorDevice, OffloadEngine

SIZE = 4096
NBYTES = SIZE * SIZE * 2
LAYERS = 6

pytestmark = pytest.mark.usefixtures("_deterministic")


def run_step(engine: OffloadEngine | None, weights: list[torch.nn.Parameter], window_bytes: int | None) -> int:
    """Return the bytes allocated when the host reaches the loss, with the device far behind."""
    sites = Sites(engine)
    h = torch.full((SIZE, SIZE), 0.5, device="cuda", dtype=torch.bfloat16)
    torch.cuda._sleep(200_000_000)  # a tenth of a second: the host finishes forward before the device starts it
    for w in weights:
        h = sites(lambda h, w=w: (h @ w).sin(), h)
    if engine is not None:
        engine.expect_backward(sites.lane, window_bytes=window_bytes)
    allocated = torch.cuda.memory_allocated()
    loss = h.sum()
    del h
    loss.backward()
    return allocated


def test_groups_beyond_the_loss_window_are_freed_before_the_loss():
    weights = make_weights("cuda", LAYERS, size=SIZE)
    run_step(None, weights, None)
    expected = take_gradients(weights)
    allocated = {}
    for window_bytes in (None, 2 * NBYTES, 0):
        policy = TransferPolicy(window_bytes=1 << 30, prefetch_bytes=1 << 30)
        engine = OffloadEngine(device=AcceleratorDevice(), policy=policy, host_budget_bytes=2 << 30)
        # Measured once: if backward overtakes copies, the engine only frees their memory in the next step.
        begin = torch.cuda.memory_allocated()
        for _ in range(2):
            allocated[window_bytes] = run_step(engine, weights, window_bytes) - begin
            for found, wanted in zip(take_gradients(weights), expected, strict=True):
                assert torch.equal(found, wanted)
            torch.cuda.synchronize()
        engine.close()
    # Each layer saves its input and a product. The sine of the last product is the input of the loss.
    assert allocated[None] >= 2 * LAYERS * NBYTES
    assert allocated[2 * NBYTES] <= 3 * NBYTES
    assert allocated[0] <= 2 * NBYTES
