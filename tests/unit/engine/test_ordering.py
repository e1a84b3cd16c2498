"""What must be ordered before what, a few lines for each hazard of `hazards.py`.

That nothing else is needed, and that all this is enough, is in `test_happens_before.py`.
"""

import pytest
import torch
from support.clocks import ClockedCpuDevice
from support.sites import Sites, make_engine

from fgoffload import TransferPolicy
from fgoffload.engine import Hazard

NUMEL = 64 * 64


@pytest.fixture
def device() -> ClockedCpuDevice:
    return ClockedCpuDevice()


def leaf() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def sine(h: torch.Tensor) -> torch.Tensor:
    return h.sin()


def sine_of_columns(h: torch.Tensor) -> torch.Tensor:
    return h[:, ::16].sin()


def patient(window_bytes: int = 1 << 30) -> TransferPolicy:
    return TransferPolicy(window_bytes=window_bytes, prefetch_bytes=0)


def test_a_copy_to_the_host_comes_after_the_kernels_that_wrote_its_source(device):
    sites = Sites(make_engine(device))
    h = leaf() * 2
    producer = device.queue()
    output = sites(sine, h)
    assert producer.is_before(device.copies[0])
    del output


def test_a_copy_to_the_host_waits_for_the_streams_that_saved_and_not_only_for_the_one_that_flushes(device):
    engine = make_engine(device)
    sites = Sites(engine)
    h = leaf() * 2
    with device.on("side"):
        producer = device.queue()
        output = sites(sine, h, is_held=True)
    engine.flush()
    assert output.requires_grad
    assert producer.is_before(device.copies[0])
    del output


def test_gathering_comes_after_the_kernels_of_all_streams_that_saved(device):
    engine = make_engine(device)
    sites = Sites(engine)
    h = leaf() * 2
    with device.on("side"):
        producer = device.queue()
        output = sites(sine_of_columns, h, is_held=True)
    engine.flush()
    assert output.requires_grad
    assert producer.is_before(device.allocations[0])  # the dense buffer, which is filled right after
    assert device.allocations[0].is_before(device.copies[0])
    del output


def test_a_copy_to_the_host_comes_after_the_copy_that_reads_its_block(device):
    engine = make_engine(device, host_budget_bytes=NUMEL * 4, policy=patient(0))
    sites = Sites(engine)
    output = sites(sine, leaf() * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    del output  # nobody took what is coming back, so compute has not waited for it
    again = Sites(engine)(sine, leaf() * 2)  # gets the same block
    read, second_write = device.find_copies(device.h2d_stream)[0], device.find_copies(device.d2h_stream)[1]
    assert read.is_before(second_write)
    del again


def test_a_source_is_freed_after_its_copy_to_the_host(device):
    engine = make_engine(device, policy=patient(0))
    output = Sites(engine)(sine, leaf() * 2)
    assert device.copies[0].is_before(device.queue())
    del output


def test_a_source_is_freed_after_a_kernel_of_another_stream_that_saved_it(device):
    sites = Sites(make_engine(device, policy=patient(NUMEL * 4)))
    h = leaf() * 2
    first = sites(sine, h)
    with device.on("side"):
        second = sites(lambda h: h.cos(), h)  # the same storage, whose copy is under way
        reader = device.queue()
    third = sites(sine, first)  # past the window
    assert reader.is_before(device.queue())
    assert device.copies[0].is_before(device.queue("side"))
    del second, third


def test_past_the_window_the_stream_that_goes_on_waits_although_the_copies_are_of_another_stream(device):
    engine = make_engine(device, policy=patient(NUMEL * 4))
    with device.on("side"):
        first = Sites(engine)(sine, leaf() * 2)
    second = Sites(engine)(sine, leaf() * 2)
    first_copy, second_copy = device.find_copies(device.d2h_stream)
    goes_on = device.queue()
    assert first_copy.is_before(goes_on)
    assert not second_copy.is_before(goes_on)
    del first, second


def test_a_source_is_freed_after_a_watched_kernel_of_another_stream(device):
    engine = make_engine(device, policy=patient(0))
    sites = Sites(engine)
    h = leaf() * 2
    with device.on("side"), sites.watched():
        watched = h.cos()
        reader = device.queue()
    output = sites(sine, h)
    assert reader.is_before(device.copies[0])
    assert reader.is_before(device.queue())
    del watched, output


def test_a_copy_to_the_device_comes_after_earlier_users_of_its_buffer(device):
    engine = make_engine(device, policy=patient(0))
    output = Sites(engine)(sine, leaf() * 2)
    earlier = device.queue()
    output.sum().backward()
    assert earlier.is_before(device.find_copies(device.h2d_stream)[0])


@pytest.mark.parametrize("function", [sine, sine_of_columns])
def test_a_copy_to_the_device_comes_after_the_copy_that_wrote_its_block(function, device):
    engine = make_engine(device, policy=patient(0 if function is sine else 1 << 30))
    Sites(engine)(function, leaf() * 2).sum().backward()
    assert device.find_copies(device.d2h_stream)[0].is_before(device.find_copies(device.h2d_stream)[0])


def test_who_takes_a_buffer_comes_after_the_copy_that_fills_it(device):
    engine = make_engine(device, policy=patient(0))
    output = Sites(engine)(sine, leaf() * 2)
    with device.on("side"):
        saved = output.grad_fn._saved_self
        reader = device.queue()
    assert device.find_copies(device.h2d_stream)[0].is_before(reader)
    del saved


def test_a_second_stream_comes_after_gathered_bytes_were_put_in_place(device):
    engine = make_engine(device, policy=patient(0))
    output = Sites(engine)(lambda h: (h[:, ::16].sin(), h[:, ::16].cos()), leaf() * 2, output=lambda pair: pair[0])
    output[0].grad_fn._saved_self  # noqa: B018 - takes
    placed = device.allocations[-1]
    with device.on("side"):
        output[1].grad_fn._saved_self  # noqa: B018 - takes
        reader = device.queue()
    assert placed.is_before(reader)


def test_a_buffer_that_nobody_took_is_dropped_after_its_copy(device):
    engine = make_engine(device, policy=TransferPolicy(window_bytes=0, prefetch_bytes=1 << 30))
    sites = Sites(engine)
    output = sites(sine, sites(sine, leaf() * 2))
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    copies = device.find_copies(device.h2d_stream)
    assert len(copies) == 2
    del output
    engine.finish_step()
    assert all(copy.is_before(device.queue()) for copy in copies)


def test_a_buffer_that_another_stream_took_is_dropped_after_that_stream(device):
    engine = make_engine(device, policy=patient(0))
    sites = Sites(engine)
    output = sites(sine, leaf() * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    with device.on("side"):
        output.grad_fn._saved_self  # noqa: B018 - takes
        reader = device.queue()
    del output
    engine.finish_step()
    assert reader.is_before(device.queue())


def test_gathered_bytes_in_place_are_dropped_after_the_other_streams_that_read_them(device):
    engine = make_engine(device, policy=patient(0))
    sites = Sites(engine)
    output = sites(lambda h: (h[:, ::16].sin(), h[:, ::16].cos()), leaf() * 2, output=lambda pair: pair[0])
    with device.on("side"):
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
    output[0].grad_fn._saved_self  # noqa: B018 - takes, on the main stream, which so owns the buffer
    with device.on("side"):
        output[1].grad_fn._saved_self  # noqa: B018 - takes
        reader = device.queue()
    del output
    engine.finish_step()
    assert reader.is_before(device.queue())


def test_packed_bytes_are_dropped_after_another_stream_has_put_them_in_place(device):
    engine = make_engine(device, policy=patient(0))
    sites = Sites(engine)
    output = sites(sine_of_columns, leaf() * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    with device.on("side"):
        output.grad_fn._saved_self  # noqa: B018 - takes, and puts in place, on a stream that did not save it
    assert device.allocations[-1].is_before(device.queue())


def test_a_buffer_is_allocated_on_the_stream_that_saved_whoever_calls_it_back(device):
    engine = make_engine(device, policy=patient(0))
    sites = Sites(engine)
    with device.on("side"):
        output = sites(sine, leaf() * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    assert output.requires_grad
    assert device.allocations[-1].stream == "side"


def test_what_the_host_has_seen_on_the_host_is_not_waited_for():
    device = ClockedCpuDevice(sees_done=lambda: True)
    engine = make_engine(device, policy=patient(0))
    Sites(engine)(sine, leaf() * 2).sum().backward()
    assert len(device.find_copies(device.h2d_stream)) == 1
    assert {wait.hazard for wait in device.waits}.isdisjoint({Hazard.BLOCK_UNWRITTEN, Hazard.SOURCE_STILL_COPIED})
