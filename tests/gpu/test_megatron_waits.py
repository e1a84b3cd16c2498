"""Tests that the few bytes that Megatron's host waits for bypass the copy engine, which offload keeps busy."""

import functools
import time
import types

import pytest
import torch

from fgoffload.errors import StateError
from fgoffload.integrations.megatron.host_waits.host_writes import HostPages, write_to_host
from fgoffload.integrations.megatron.host_waits.known_counts import KnownCounts
from fgoffload.integrations.megatron.host_waits.waits import wrap_waits
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches


@pytest.mark.parametrize("write", [write_to_host, HostPages().write], ids=["alone", "in pages"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (16,), (3, 5)])
def test_host_writes_match_the_device_tensor(write, dtype, shape):
    tensor = torch.randint(-5, 1 << 30, shape, dtype=dtype, device="cuda")
    written = write(tensor)
    torch.cuda.synchronize()
    assert written.device.type == "cpu"
    assert written.is_pinned() or written.numel() == 0
    assert torch.equal(written, tensor.cpu())


@pytest.mark.parametrize("write", [write_to_host, HostPages().write], ids=["alone", "in pages"])
def test_strided_tensors_are_written_in_logical_order(write):
    tensor = torch.arange(12, device="cuda").view(3, 4).t()
    written = write(tensor)
    torch.cuda.synchronize()
    assert torch.equal(written, tensor.cpu())


def test_pages_pack_small_tensors_without_overlap():
    pages = HostPages()
    tensors = [torch.randint(0, 1 << 30, (3000 + 500 * number,), device="cuda") for number in range(20)]
    tensors += [torch.randint(0, 1 << 30, (17,), device="cuda") for _ in range(2000)]
    written = [pages.write(tensor) for tensor in tensors]
    torch.cuda.synchronize()
    assert all(torch.equal(own, tensor.cpu()) for own, tensor in zip(written, tensors, strict=True))
    assert len({own.untyped_storage().data_ptr() for own in written}) < 40  # of 2020


def test_a_page_with_pending_writes_is_not_reused():
    pages, late = HostPages(), torch.cuda.Stream()
    first = torch.full((8192,), 7, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        torch.cuda._sleep(400_000_000)  # some 200 ms
        pages.write(first)  # without keeping the result
    pages.write(torch.zeros(1, dtype=torch.int64, device="cuda"))  # needs a new page, so the first one is retired
    others = [torch.empty(8192, dtype=torch.int64, pin_memory=True).fill_(1) for _ in range(8)]
    assert not late.query()
    torch.cuda.synchronize()
    assert all((other == 1).all() for other in others)


def measure_seconds(move, counts, busy):
    """Return the host's wait for `move(counts)` behind a copy of `busy`, and whether the copy was still running."""
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


def test_kernel_writes_do_not_wait_behind_a_large_copy(busy):
    counts = torch.arange(16, device="cuda")
    for move in (write_to_host, lambda tensor: tensor.to("cpu", non_blocking=True)):
        measure_seconds(move, counts, busy)  # the first calls load kernels and pin memory
    bypassing_s, was_busy = measure_seconds(write_to_host, counts, busy)
    behind_copy_s, _ = measure_seconds(lambda tensor: tensor.to("cpu", non_blocking=True), counts, busy)
    # 1 GiB takes at least 20 ms; the kernel and the host's calls take a fraction of 1 ms.
    assert was_busy
    assert bypassing_s < behind_copy_s / 4


def exchange(communicator, computed):
    """Run an exchange between stages behind a kernel on the current stream and a longer one on another stream."""
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


def test_stage_exchanges_wait_for_compute_but_not_for_copies(monkeypatch):
    module = load_module("megatron.core.pipeline_parallel.p2p_communication")
    config = load_module("megatron.core.model_parallel_config").ModelParallelConfig()
    communicator = object.__new__(module.P2PCommunicator)
    communicator.__dict__.update(config=config, pp_group=None, next_rank=0, prev_rank=0)
    monkeypatch.setattr(module, "_batched_p2p_ops", lambda **_: [types.SimpleNamespace(wait=lambda: None)])
    assert exchange(communicator, torch.cuda.Event()) == (True, True)  # Megatron's own
    for has_waiting_layers in (False, True):
        offload = types.SimpleNamespace(has_waiting_layers=has_waiting_layers)
        with Patches() as patches:
            wrap_waits(patches, lambda offload=offload: offload)
            assert exchange(communicator, torch.cuda.Event()) == (not has_waiting_layers, False)
    assert exchange(communicator, torch.cuda.Event()) == (True, True)


def measure_behind_copy(wait, busy):
    """Call `wait` behind a copy of `busy`; return its result, its duration, and whether the copy was still running."""
    source, target = busy
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        target.copy_(source, non_blocking=True)
        done = copies.record_event()
    begin = time.perf_counter()
    result = wait()
    seconds = time.perf_counter() - begin
    was_busy = not done.query()
    torch.cuda.synchronize()
    return result, seconds, was_busy


@pytest.fixture
def busy():
    """Return 1 GiB on the device and on the host: a copy takes at least 20 ms, everything else a fraction of 1 ms."""
    return torch.ones(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)


def check_bypasses_copy(act, busy):
    """Check that `act` does not wait behind a copy of `busy` with wrapped waits; return its results without and with them."""
    measure_behind_copy(act, busy)  # the first calls load kernels
    expected, behind_copy_s, _ = measure_behind_copy(act, busy)
    with Patches() as patches:
        wrap_waits(patches, lambda: None)
        measure_behind_copy(act, busy)
        found, bypassing_s, was_busy = measure_behind_copy(act, busy)
    assert was_busy
    assert bypassing_s < behind_copy_s / 4
    return expected, found


def test_loss_checks_do_not_wait_behind_a_large_copy(busy, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # without it newer versions warn
    module = load_module("megatron.core.rerun_state_machine")
    machine = module.RerunStateMachine(mode=module.RerunMode.DISABLED)
    loss = torch.tensor(1.0, device="cuda")

    def check(loss=loss):
        machine.validate_result(result=loss, rejection_func=torch.isnan, message="found NaN")

    check_bypasses_copy(check, busy)
    with Patches() as patches:
        wrap_waits(patches, lambda: None)
        with pytest.raises(RuntimeError, match="found NaN"):
            check(loss * float("nan"))


def test_packed_sequence_lengths_do_not_wait_behind_a_large_copy(busy):
    module = load_module("megatron.core.models.common.embeddings.rope_utils")
    bounds = torch.tensor([0, 16, 24, 32], dtype=torch.int32, device="cuda")
    heads, angles = torch.randn(32, 2, 8, device="cuda"), torch.randn(32, 1, 1, 8, device="cuda")
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def rotate():
        return module._apply_rotary_pos_emb_thd(heads, bounds, angles, cp_group=group)

    expected, found = check_bypasses_copy(rotate, busy)
    assert torch.equal(found, expected)


def test_shape_exchanges_between_stages_do_not_wait_behind_a_large_copy(busy, monkeypatch):
    def loop_back(operations):
        sent, received = (
            [shape for operation, shape, *_ in operations if operation is kind]
            for kind in (torch.distributed.isend, torch.distributed.irecv)
        )
        for source, target in zip(reversed(sent), received, strict=True):
            torch.add(source, 0, out=target)  # a kernel, like NCCL's
        return [types.SimpleNamespace(wait=lambda: None)]

    monkeypatch.setattr(torch.distributed, "P2POp", lambda *operation: operation)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", loop_back)
    module = load_module("megatron.core.pipeline_parallel.p2p_communication")
    config = load_module("megatron.core.model_parallel_config").ModelParallelConfig(variable_seq_lengths=True)
    communicator = object.__new__(module.P2PCommunicator)
    communicator.__dict__.update(config=config, pp_group=None, next_rank=0, prev_rank=0)
    following, previous = torch.empty(5, 6, 7, device="cuda"), torch.empty(8, 9, 10, device="cuda")

    def exchange_with_neighbours():
        return communicator._communicate_shapes(following, previous, recv_prev=True, recv_next=True)

    for shapes in check_bypasses_copy(exchange_with_neighbours, busy):
        assert [list(shape) for shape in shapes] == [[5, 6, 7], [8, 9, 10]]


def test_recompute_compares_token_counts_later_instead_of_waiting_for_them():
    known, dispatcher = KnownCounts(), types.SimpleNamespace()
    counts = torch.tensor([3, 5], device="cuda")

    def request(_, __):
        torch.cuda._sleep(200_000_000)  # some 100 ms
        moved = move(counts)
        dispatcher.d2h_event = torch.cuda.current_stream().record_event()
        return moved

    def dispatch():
        begin = time.perf_counter()
        moved = wait(dispatcher, "before_permutation_1")
        dispatcher.d2h_event.synchronize()
        return moved.tolist(), time.perf_counter() - begin

    move = functools.partial(known._move, lambda tensor: tensor.to("cpu", non_blocking=True))
    wait = functools.partial(known._wait, request)
    function = known._reuse_counts(dispatch)
    function()  # the first calls load kernels and pin memory
    first, second = known._reuse_counts(dispatch), known._reuse_counts(dispatch)
    (_, forward_s), (_, recompute_s) = first(), first()
    assert recompute_s < forward_s / 4
    torch.cuda.synchronize()
    assert second()[0] == [3, 5]  # all counts so far are equal
    counts += 1
    assert second()[0] == [3, 5]
    torch.cuda.synchronize()
    with pytest.raises(StateError, match=r"sent \[4, 6\] tokens to its experts or ranks, but its forward sent \[3, 5\]"):
        second()
