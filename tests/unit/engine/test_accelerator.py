"""The accelerator's device, with stand-ins for torch's streams and events, so that no accelerator is needed."""

import threading
import types

import pytest
import torch

from fgoffload.engine import AcceleratorDevice, Hazard


class Event:
    """Knows the stream on which it was recorded last."""

    def __init__(self, device: torch.device) -> None:
        self.stream = None

    def record(self, stream: object) -> None:
        self.stream = stream


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "Stream", lambda device: types.SimpleNamespace(device=device))
    monkeypatch.setattr(torch, "Event", Event)


class InterruptedDevice(AcceleratorDevice):
    """Lets another thread wait for another stream between the two halves of the first wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[object, object]] = []

    def wait_event(self, stream, event, hazard):
        if stream == "first":
            thread = threading.Thread(target=self.wait_stream, args=("second", "another source", hazard))
            thread.start()
            thread.join()
        self.waits.append((stream, event.stream))


def test_waits_of_two_threads_at_once_are_each_for_their_own_stream():
    device = InterruptedDevice()
    device.wait_stream("first", "source", Hazard.SOURCE_UNWRITTEN)
    assert device.waits == [("second", "another source"), ("first", "source")]


def test_waits_that_pass_share_an_event_and_none_is_made_for_each(monkeypatch):
    device = InterruptedDevice()
    monkeypatch.setattr(torch, "Event", None)
    for source in ("a", "b", "c"):
        device.wait_stream("second", source, Hazard.SOURCE_UNWRITTEN)
    assert device.waits == [("second", source) for source in ("a", "b", "c")]
