"""Tests the accelerator device with fake torch streams and events."""

import ctypes
import dataclasses
import itertools
import sys
import threading
import types
from typing import ClassVar

import pytest
import torch
from support.models import ALL, ATTN_BYTES, LAYERS, MLP_BYTES, PATTERNS, check_equal, get_gradients, make_inputs, make_net

import fgoffload
from fgoffload.engine import AcceleratorDevice, Hazard, cuda_copies, find_device

pytestmark = pytest.mark.quick


class Event:
    """Records the last stream that it was recorded on."""

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's
        self.stream = None

    def record(self, stream: object) -> None:
        self.stream = stream


@pytest.fixture(autouse=True)
def _fake_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "Stream", lambda device: types.SimpleNamespace(device=device))
    monkeypatch.setattr(torch, "Event", Event)


class Stream:
    """Records the events that it waits for; `interrupt` first runs on another thread."""

    def __init__(self, interrupt=lambda: None) -> None:
        self.waits: list[object] = []
        self._interrupt = interrupt

    def wait_event(self, event: Event) -> None:
        thread = threading.Thread(target=self._interrupt)
        thread.start()
        thread.join()
        self.waits.append(event.stream)


def test_concurrent_waits_on_two_threads_use_separate_events():
    device, second = AcceleratorDevice(), Stream()
    first = Stream(lambda: device.wait_stream(second, "another source", Hazard.SOURCE_UNWRITTEN))
    device.wait_stream(first, "source", Hazard.SOURCE_UNWRITTEN)
    assert (first.waits, second.waits) == (["source"], ["another source"])


def test_an_event_is_not_reused_while_it_is_referenced():
    # Otherwise a later query or wait would refer to another copy.
    device = AcceleratorDevice()
    events = [device.record_event(f"copy {number}") for number in range(3)]
    also_referenced = events[1]
    del events[1]
    later = [device.record_event(f"later copy {number}") for number in range(3)]
    assert [point.event.stream for point in (events[0], also_referenced, events[1])] == ["copy 0", "copy 1", "copy 2"]
    assert [point.event.stream for point in later] == [f"later copy {number}" for number in range(3)]


class Runtime:
    """A fake CUDA runtime that copies immediately and records all calls."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []

        def copy(destination, source, nbytes, kind, stream):
            self.calls.append((destination, source, nbytes, kind, stream))
            if status == 0:
                ctypes.memmove(destination, source, nbytes)
            return status

        self.cudaMemcpyAsync = copy


@pytest.fixture
def use_runtime(monkeypatch):
    """Return a function that replaces the CUDA runtime by a `Runtime`."""

    def use(runtime):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda **names: types.SimpleNamespace(cuda_stream=names["stream_id"] * 16), raising=False
        )
        monkeypatch.setattr(
            torch, "Stream", lambda device: RawStream(stream_id=next(identifiers), device_index=0, device_type=1), raising=False
        )
        return runtime

    identifiers = itertools.count(1)
    return use


@dataclasses.dataclass(frozen=True)
class RawStream:
    """A torch stream."""

    stream_id: int
    device_index: int
    device_type: int
    waits: ClassVar[list[tuple[int, int]]] = []

    def wait_event(self, event):
        self.waits.append((self.stream_id, event.stream.stream_id))

    def __enter__(self):
        raise AssertionError("entering the stream wastes CPU time: the runtime receives it as an argument")

    def __exit__(self, *_):
        raise AssertionError("the stream was entered")


def test_pinned_copies_call_cudaMemcpyAsync_in_pieces_on_alternating_streams(use_runtime, monkeypatch):
    monkeypatch.setattr(cuda_copies, "D2H_PIECE_BYTES", 20)
    monkeypatch.setattr(cuda_copies, "H2D_PIECE_BYTES", 16)
    runtime = use_runtime(Runtime())
    device = AcceleratorDevice()
    source, destination = torch.arange(24, dtype=torch.int16).view(4, 6), torch.zeros(4, 6, dtype=torch.int16)
    for stream in (device.d2h_stream, device.h2d_stream):
        with device.copying_on(stream):
            device.copy_bytes(destination=destination, source=source, stream=stream)
        assert torch.equal(destination, source)
        destination.zero_()
    offsets = [(to - destination.data_ptr(), origin - source.data_ptr(), *rest) for to, origin, *rest in runtime.calls]
    assert offsets[:3] == [(0, 0, 20, 4, 16), (20, 20, 20, 4, 48), (40, 40, 8, 4, 16)]
    assert offsets[3:] == [(0, 0, 16, 4, 32), (16, 16, 16, 4, 64), (32, 32, 16, 4, 32)]
    assert RawStream.waits == [(3, 1), (1, 3), (4, 2), (2, 4)], "each piece waits for the previous one"


def test_a_cuda_error_is_raised(use_runtime, monkeypatch):
    use_runtime(Runtime(status=700))
    checked = []
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    device = AcceleratorDevice()
    device.copy_bytes(destination=torch.zeros(4), source=torch.ones(4), stream=device.d2h_stream)
    assert checked == [700]


@pytest.mark.parametrize("is_on", [True, False])
def test_copies_go_through_torch_when_its_cuda_sanitizer_is_enabled(is_on, use_runtime, monkeypatch):
    runtime = use_runtime(Runtime())
    sanitizer = types.SimpleNamespace(cuda_sanitizer=types.SimpleNamespace(enabled=is_on))
    monkeypatch.setitem(sys.modules, "torch.cuda._sanitizer", sanitizer)
    device = AcceleratorDevice()
    destination = torch.zeros(4)
    device.copy_bytes(destination=destination, source=torch.ones(4), stream=device.d2h_stream)
    assert torch.equal(destination, torch.ones(4))
    assert len(runtime.calls) == (0 if is_on else 1)


def test_copies_go_through_torch_if_the_runtime_lacks_cudaMemcpyAsync(use_runtime):
    use_runtime(types.SimpleNamespace())  # as in ROCm, whose functions begin with `hip`
    device = AcceleratorDevice()
    destination = torch.zeros(4)
    device.copy_bytes(destination=destination, source=torch.ones(4), stream=device.d2h_stream)
    assert torch.equal(destination, torch.ones(4))
    assert device.copying_on(device.d2h_stream) is device.d2h_stream


class ImmediateStream:
    """A stream of an accelerator other than CUDA, on which work completes when it is queued."""

    entered: ClassVar[list["ImmediateStream"]] = []

    def __init__(self, device: torch.device) -> None:
        self.waited = 0

    def wait_event(self, event: Event) -> None:
        self.waited += 1

    def __enter__(self) -> None:
        ImmediateStream.entered.append(self)

    def __exit__(self, *_: object) -> None:
        ImmediateStream.entered.pop()


@pytest.fixture(params=["privateuseone", "xpu"])  # torch_npu renames the first to `npu`
def other_accelerator(request, monkeypatch):
    """A fake accelerator in CPU memory, without host registration, raw streams, graphs and the CUDA runtime."""

    def refuse(*given, **names):
        raise AssertionError("a CUDA function was called")

    cpu, empty, pinned = torch.device("cpu"), torch.empty, []
    compute = ImmediateStream(cpu)

    def allocate(*size, pin_memory=False, **names):
        pinned.extend(size if pin_memory else ())
        return empty(*size, **names)

    for name in ("cudart", "_sleep", "is_current_stream_capturing", "synchronize", "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", refuse, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(
        torch._C, "_accelerator_getStream", lambda index: ImmediateStream.entered[-1] if ImmediateStream.entered else compute
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(request.param))
    monkeypatch.setattr(torch, "Stream", ImmediateStream)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(Event, "query", lambda event: True, raising=False)
    monkeypatch.setattr(Event, "synchronize", lambda event: None, raising=False)
    monkeypatch.setattr(Event, "elapsed_time", lambda event, end: 1.0, raising=False)
    device = find_device(request.param)
    device._device = cpu
    return types.SimpleNamespace(device=device, pinned=pinned)


def test_offload_on_an_accelerator_other_than_cuda_is_bitwise_identical(other_accelerator):
    device, net, inputs = other_accelerator.device, make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, PATTERNS, dataclasses.replace(ALL, is_timed=True), device=device) as handle:
        for _ in range(2):
            check_equal(expected, get_gradients(net, lambda: net(inputs)))
        stats = handle.stats()
        assert stats.d2h_bytes == 2 * LAYERS * (ATTN_BYTES + MLP_BYTES)
        assert sum(other_accelerator.pinned) == handle.engine.arena.reserved_bytes > 0
        assert min(device.d2h_stream.waited, device.h2d_stream.waited) > 0
    assert handle.engine.arena.reserved_bytes == 0
