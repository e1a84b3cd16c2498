"""Checks the GPUs, their links to the host, and the copy rates."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fgoffload.doctor.machine import Machine
from fgoffload.doctor.result import CheckResult, fail, ok, skip, warn
from fgoffload.units import MIB, format_bytes

_FIELDS = (
    "uuid",
    "name",
    "pci.bus_id",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "memory.total",
    "driver_version",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")

LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one PCIe lane in one direction after line coding, keyed by PCIe generation. Source: PCI Express base
specification 6.0."""

EXPECTED_FRACTION = 0.65
"""Fraction of the link rate that copies should reach. Pinned copies reach 75 to 87%: 47 to 55 of 63 GB/s on PCIe 5 x16,
measured on an H100."""


class Gpu(NamedTuple):
    """A GPU as reported by `nvidia-smi`. Unknown values are None."""

    uuid: str
    name: str
    bus_id: str
    """PCI bus ID, for example `00000000:17:00.0`."""
    generation: int | None
    """Highest PCIe generation that both GPU and slot support. Idle links use a lower generation to save power."""
    width: int | None
    """Number of PCIe lanes in use."""
    max_width: int | None
    memory_bytes: int | None
    driver: str

    @property
    def link_rate(self) -> float | None:
        """Maximum rate of the link in one direction, in bytes per second."""
        if self.generation not in LANE_RATES or self.width is None:
            return None
        return LANE_RATES[self.generation] * self.width


def find_gpus(machine: Machine) -> tuple[list[Gpu], str]:
    """Return the GPUs that torch can use, in torch's order, and the reason if the list is empty."""
    count = machine.count_gpus()
    if not count:
        return [], "torch finds no usable GPU"
    ended = machine.run(QUERY, {})
    listed = {gpu.uuid: gpu for gpu in read_gpus(ended.output)} if ended.exit_code == 0 else {}
    gpus = [listed[uuid] for uuid in map(machine.find_gpu_uuid, range(count)) if uuid in listed]
    return gpus, "" if gpus else f"nvidia-smi does not list the GPUs: {ended.output.strip()[:200] or 'no output'}"


def read_gpus(text: str) -> list[Gpu]:
    """Parse the GPUs from the output of `QUERY`."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) or not cells[0].startswith("GPU-"):
            continue  # not a GPU, for example a driver warning
        uuid, name, bus_id, *numbers, driver = cells
        generation, width, max_width, memory = map(_read_number, numbers)
        memory_bytes = None if memory is None else memory * MIB
        gpus.append(Gpu(uuid, name, bus_id, generation, width, max_width, memory_bytes, driver))
    return gpus


def check_gpus(machine: Machine, gpus: Sequence[Gpu], reason: str) -> Iterator[CheckResult]:
    """Report the GPUs, and check the link and the copy rates of each."""
    if not gpus:
        yield from (skip(name, reason) for name in ("GPUs", "link to the host", "copy rates"))
        return
    names = sorted({gpu.name for gpu in gpus})
    found = f"{len(gpus)} x {', '.join(names)}, driver {gpus[0].driver}"
    if gpus[0].memory_bytes is not None:
        found += f", {format_bytes(gpus[0].memory_bytes)} each"
    yield ok("GPUs", found)
    for index, gpu in enumerate(gpus):
        yield check_link(index, gpu)
        yield _check_rates(machine, index, gpu)


def check_link(index: int, gpu: Gpu) -> CheckResult:
    """Check that the link uses all lanes that the GPU supports."""
    name = f"GPU {index}: link to the host"
    if gpu.link_rate is None:
        return skip(name, "nvidia-smi does not report the PCIe link; see the copy rates")
    found = f"PCIe {gpu.generation} x{gpu.width}: up to {gpu.link_rate / 1e9:.0f} GB/s each way"
    if gpu.width is not None and gpu.max_width is not None and gpu.width < gpu.max_width:
        fix = "use a slot with all lanes, reseat the GPU or its riser, or ask your administrator"
        return warn(name, f"{found}; the GPU supports x{gpu.max_width}", fix)
    return ok(name, found)


def _check_rates(machine: Machine, index: int, gpu: Gpu) -> CheckResult:
    name = f"GPU {index}: copy rates"
    try:
        rates = machine.measure_copies(index)
    except RuntimeError as error:  # torch raises this for all CUDA errors
        fix = "free memory on the GPU and the host, and look for GPU errors in `dmesg`"
        return fail(name, f"a pinned copy failed: {str(error).splitlines()[0]}", fix)
    found = f"{rates.d2h / 1e9:.1f} GB/s to the host, {rates.h2d / 1e9:.1f} GB/s to the device"
    if gpu.link_rate is None:
        return ok(name, found)
    slower = min(rates.d2h, rates.h2d) / gpu.link_rate
    found += f"; the slower direction reaches {slower:.0%} of the link's maximum"
    if slower < EXPECTED_FRACTION:
        others = "stop other jobs that use the link, and in a virtual machine check the IOMMU and ACS settings"
        return warn(name, found, f"bind the process to the GPU's NUMA node, {others}")
    return ok(name, found)


def _read_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
