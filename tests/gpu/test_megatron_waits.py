"""The few bytes that Megatron's host waits for go around the copy engine that offload keeps busy."""

import time
import types

import pytest
import torch

from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.waits import step_aside, write_to_host


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (16,), (3, 5)])
def test_what_a_kernel_writes_is_the_same(dtype, shape):
    tensor = torch.randint(-5, 1 << 30, shape, dtype=dtype, device="cuda")
    written = write_to_host(tensor)
    torch.cuda.synchronize()
    assert written.device.type == "cpu"
    assert written.is_pinned() or written.numel() == 0
    assert torch.equal(written, tensor.cpu())


def test_strided_tensors_are_written_in_their_order():
    tensor = torch.arange(12, device="cuda").view(3, 4).t()
    written = write_to_host(tensor)
    torch.cuda.synchronize()
    assert torch.equal(written, tensor.cpu())


def measure_seconds(move, counts, busy):
    """Return how long the host waits for `counts` by `move` behind a copy of `busy`, and whether that was running still."""
    source, target = busy
    copies, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        target.copy_(source, non_blocking=True)
        done = copies.record_event()
    with torch.cuda.stream(side):
        begin = time.perf_counter()
        moved = move(counts)
        side.record_event().synchronize()
        seconds = time.perf_counter() - begin
    was_busy = not done.query()
    torch.cuda.synchronize()
    assert torch.equal(moved, counts.cpu())
    return seconds, was_busy


def test_a_kernel_does_not_wait_behind_a_big_copy_and_the_copy_engine_does():
    counts = torch.arange(16, device="cuda")
    busy = torch.ones(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    for move in (write_to_host, lambda tensor: tensor.to("cpu", non_blocking=True)):
        measure_seconds(move, counts, busy)  # the first calls load kernels and pin memory
    around, was_busy = measure_seconds(write_to_host, counts, busy)
    behind, _ = measure_seconds(lambda tensor: tensor.to("cpu", non_blocking=True), counts, busy)
    # 1 GiB takes 20 ms and more; a kernel of 16 numbers and the host's calls a fraction of one.
    assert was_busy
    assert around < behind / 4


def exchange(communicator, computed):
    """Let an exchange between stages wait, behind a kernel on the current stream and a long one on another."""
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        torch.cuda._sleep(400_000_000)  # some 200 ms
        copied = copies.record_event()
    torch.cuda._sleep(20_000_000)
    computed.record()
    communicator._communicate(tensor_send_next=None, tensor_send_prev=None, recv_prev=False, recv_next=False, tensor_shape=None)
    was_computed, was_copied = computed.query(), copied.query()
    torch.cuda.synchronize()
    return was_computed, was_copied


def test_an_exchange_between_stages_waits_for_compute_and_not_for_copies(monkeypatch):
    module = load_module("megatron.core.pipeline_parallel.p2p_communication")
    config = load_module("megatron.core.model_parallel_config").ModelParallelConfig()
    communicator = object.__new__(module.P2PCommunicator)
    communicator.__dict__.update(config=config, pp_group=None, next_rank=0, prev_rank=0)
    monkeypatch.setattr(module, "_batched_p2p_ops", lambda **_: [types.SimpleNamespace(wait=lambda: None)])
    assert exchange(communicator, torch.cuda.Event()) == (True, True)  # Megatron's own
    with Patches() as patches:
        step_aside(patches, lambda: None)
        assert exchange(communicator, torch.cuda.Event()) == (True, False)
    assert exchange(communicator, torch.cuda.Event()) == (True, True)


def measure_check_seconds(machine, loss, busy):
    """Return how long the host takes to check `loss` behind a copy of `busy`, and whether that was running still."""
    source, target = busy
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        target.copy_(source, non_blocking=True)
        done = copies.record_event()
    begin = time.perf_counter()
    machine.validate_result(result=loss, rejection_func=torch.isnan, message="found NaN")
    seconds = time.perf_counter() - begin
    was_busy = not done.query()
    torch.cuda.synchronize()
    return seconds, was_busy


def test_the_check_of_a_loss_does_not_wait_behind_a_big_copy():
    module = load_module("megatron.core.rerun_state_machine")
    machine = module.RerunStateMachine(mode=module.RerunMode.DISABLED)
    busy = torch.ones(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    loss = torch.tensor(1.0, device="cuda")
    measure_check_seconds(machine, loss, busy)
    behind, _ = measure_check_seconds(machine, loss, busy)
    with Patches() as patches:
        step_aside(patches, lambda: None)
        measure_check_seconds(machine, loss, busy)
        around, was_busy = measure_check_seconds(machine, loss, busy)
        with pytest.raises(RuntimeError, match="found NaN"):
            machine.validate_result(result=loss * float("nan"), rejection_func=torch.isnan, message="found NaN")
    assert was_busy
    assert around < behind / 4
