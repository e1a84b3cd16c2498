"""The engine on a real device: bits, memory, and copies that are late on purpose."""

import pytest
import torch
from support.locking import is_locked
from support.sites import Sites

from fgoffload import TransferPolicy
from fgoffload.engine import AcceleratorDevice, OffloadEngine

N = 1024
NBYTES = N * N * 2


class LateDevice(AcceleratorDevice):
    """Copies of one direction start late, so that whoever does not wait for them reads what is not there."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self._late_stream = {"d2h": self.d2h_stream, "h2d": self.h2d_stream, "none": None}[late]

    def copy_bytes(self, *, destination, source, stream) -> None:
        if stream is self._late_stream:
            with stream:
                torch.cuda._sleep(20_000_000)  # about 10 ms
        super().copy_bytes(destination=destination, source=source, stream=stream)


def make_weights(count: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(N, N, generator=generator) / 32).to("cuda", torch.bfloat16)) for _ in range(count)]


def run(engine: OffloadEngine | None, weights: list[torch.nn.Parameter], *, microbatches: int = 2) -> list[torch.Tensor]:
    for w in weights:
        w.grad = None
    for microbatch in range(microbatches):
        sites = Sites(engine, microbatch=microbatch)
        h = torch.full((N, N), 0.5 + microbatch, device="cuda", dtype=torch.bfloat16)
        with sites.watched():
            for w in weights:
                h = sites(lambda h, w=w: torch.nn.functional.gelu(h @ w), h) + h[:, :1]
                h = sites(lambda h: h[:, ::3].sin().repeat(1, 3)[:, :N] * h, h, tag="moe_act")
        h.float().square().mean().backward()
    return [w.grad.clone() for w in weights]


def make_engine(device: AcceleratorDevice, **policy: int) -> OffloadEngine:
    return OffloadEngine(device=device, policy=TransferPolicy(**policy), host_budget_bytes=1 << 30)


@pytest.mark.parametrize("late", ["none", "d2h", "h2d"])
@pytest.mark.parametrize("prefetch_bytes", [0, 4 * NBYTES, 1 << 30])
@pytest.mark.parametrize("window_bytes", [0, 4 * NBYTES, 1 << 30])
def test_bits_are_the_same_however_late_copies_are(late, window_bytes, prefetch_bytes):
    weights = make_weights(4)
    expected = run(None, weights)
    engine = make_engine(LateDevice(late), window_bytes=window_bytes, prefetch_bytes=prefetch_bytes)
    for _ in range(3):
        # Freed memory holds NaN: whatever reads it too late, or is written too early, shows.
        poison = torch.full((64 * N * N,), float("nan"), device="cuda", dtype=torch.bfloat16)
        del poison
        for one, other in zip(expected, run(engine, weights), strict=True):
            assert torch.equal(one, other)
    assert engine.finish_step().d2h_bytes > 0
    engine.close()


def test_allocated_bytes_after_forward_fall_by_exactly_what_left():
    weights = make_weights(6)
    allocated = []
    for engine in (None, make_engine(AcceleratorDevice(), window_bytes=0)):
        sites = Sites(engine)
        h = torch.ones(N, N, device="cuda", dtype=torch.bfloat16)
        for w in weights:
            h = sites(lambda h, w=w: (h @ w).sin(), h)
        torch.cuda.synchronize()
        if engine:
            engine._transfers.poll()
        allocated.append(torch.cuda.memory_allocated())
        h.sum().backward()
        del h
        for w in weights:
            w.grad = None
    # Six inputs, the first one held by nobody else either, and six products.
    assert allocated[0] - allocated[1] == 12 * NBYTES
    assert engine.finish_step().d2h_bytes == 12 * NBYTES
    engine.close()


def get_requested_bytes() -> int:
    """Return what tensors asked for; `memory_allocated` adds what the allocator could not split off."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_reserved_memory_does_not_grow_and_everything_is_back_after_close():
    weights = make_weights(4)
    run(None, weights)
    before = get_requested_bytes()
    engine = make_engine(AcceleratorDevice(), window_bytes=2 * NBYTES, prefetch_bytes=2 * NBYTES)
    reserved = []
    for step in range(50):
        run(engine, weights)
        if step in (5, 49):
            torch.cuda.synchronize()
            reserved.append((torch.cuda.memory_reserved(), engine.arena.reserved_bytes))
    assert reserved[0] == reserved[1]
    engine.close()
    assert get_requested_bytes() == before
    assert engine.arena.reserved_bytes == 0


def test_host_memory_is_locked_at_its_exact_size():
    device = AcceleratorDevice()
    slab = device.allocate_host(100 * 1024 * 1024 + 4096)
    assert slab.buffer.numel() == 100 * 1024 * 1024 + 4096
    source = torch.arange(slab.buffer.numel() // 8, device="cuda").view(torch.uint8)
    with device.copying_on(device.d2h_stream):
        device.copy_bytes(destination=slab.buffer, source=source, stream=device.d2h_stream)
    done = device.record_event(device.d2h_stream)
    assert is_locked(slab.buffer)
    device.synchronize(done)
    assert torch.equal(slab.buffer, source.cpu())
    slab.close()
