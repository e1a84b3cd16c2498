"""examples/benchmarks/energy_meter.py: what is read of a driver's library, with one that stands in for it."""

import sys
import time
import types

import pytest
from support.scripts import load_script

from fgoffload.errors import ConfigError


@pytest.fixture(scope="module")
def meters():
    with load_script("energy_meter") as module:
        yield module


class Driver(types.ModuleType):
    """A device that draws 100 J between any two questions, at its power limit in every other sample."""

    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonSwPowerCap = 4

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_counter=True):
        super().__init__("pynvml")
        self.asked, self.millijoules, self.samples, self.has_counter = [], 0, 0, has_counter

    def nvmlInit(self):
        self.asked.append("init")

    def nvmlShutdown(self):
        self.asked.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"device {index}"

    def nvmlDeviceGetHandleByUUID(self, name):
        return f"device {name}"

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        self.asked.append(device)
        self.millijoules += 100_000
        return self.millijoules

    def nvmlDeviceGetClockInfo(self, device, kind):
        assert kind == self.NVML_CLOCK_SM
        return 1700

    def nvmlDeviceGetPowerUsage(self, device):
        return 685_000  # mW

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        self.samples += 1
        return 4 if self.samples % 2 else 1


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_a_reading_has_the_joules_of_its_stretch_and_samples_within_it(meters, driver):
    with meters.EnergyMeter() as meter, meter.read() as reading:
        while len(reading.clocks_mhz) < 4:
            time.sleep(0.001)
    assert reading.joules == 100.0
    assert set(reading.clocks_mhz) == {1700}
    assert set(reading.watts) == {685.0}
    assert reading.is_capped[:4] == [True, False, True, False]
    assert driver.asked[0] == "init"
    assert driver.asked[-1] == "shutdown"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "device 0"), ("", "device 0"), ("3,1", "device 3"), ("GPU-1a", "device GPU-1a")]
)
def test_the_device_is_the_first_that_a_process_would_use(meters, driver, monkeypatch, visible, device):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meters.EnergyMeter()
    assert driver.asked[-1] == device


@pytest.mark.parametrize("visible", ["MIG-x", "0"])
def test_a_device_that_cannot_be_read_is_refused(meters, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", Driver(has_counter=False))
    with pytest.raises(ConfigError, match=f"energy of GPU '{visible}' cannot be read"):
        meters.EnergyMeter()


def test_what_several_readings_say_is_of_all_their_steps_and_samples(meters):
    readings = [
        meters.Reading(300.0, [1600], [680.0], [True]),
        meters.Reading(500.0, [1700, 1800, 1900], [690.0, 690.0, 700.0], [True, False, False]),
    ]
    assert meters.summarize(readings, steps=4) == meters.Energy(200.0, 1750.0, 690.0, 0.5)
    assert meters.summarize([meters.Reading(3.0)], steps=3) == meters.Energy(1.0, 0.0, 0.0, 0.0)
