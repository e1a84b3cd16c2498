"""Measures the CPU time of an offload region: Python and driver calls in forward and backward, including those for copies.

    python examples/benchmarks/bench_region_cost.py [--regions 24] [--repeats 40] [--megatron] [--profile]

Each region saves one tensor of 4 MiB. One repeat is a forward and a backward through a chain of regions. Its CPU time is the
time until both calls return, minus the time without regions. The device is idle at the start of a repeat, and no call waits for
it within the repeat. Systems alternate in each repeat, so a slow host affects all of them.

`--megatron` also runs Megatron-Core's own engine, which needs megatron-core, Transformer Engine, a GPU and
NVTE_CPU_OFFLOAD_V1=1 (set by the script). `--profile` lists the slowest functions after the table.

Expected output: a row for each system with p20, median and p80 per region. On a CPU, copies run synchronously and count as CPU
time, so only a GPU shows the engine's own cost.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from fgoffload import Site
from fgoffload.engine import Lane, OffloadEngine, find_device

SAVED_BYTES = 4 * 1024 * 1024

Forward = Callable[[torch.Tensor], torch.Tensor]


class PlainChain:
    """The chain of ops without regions."""

    name = "no regions"

    def __init__(self, regions: int) -> None:
        self.regions = regions

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the output of the chain for `h`."""
        for _ in range(self.regions):
            h = h.sin()
        return h

    def finish(self) -> None:
        """Do nothing, since this chain offloads nothing."""


class OurChain(PlainChain):
    """The chain with a region of fgoffload's engine around each op."""

    name = "fgoffload"

    def __init__(self, regions: int, device: str) -> None:
        super().__init__(regions)
        self.engine = OffloadEngine(device=find_device(device), host_budget_bytes=1 << 30)
        self.sites = [Site(chunk=0, layer=layer, tag="core_attn") for layer in range(regions)]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the output of the chain for `h`."""
        lane = Lane(chunk=0, microbatch=0)
        for site in self.sites:
            region = self.engine.find_region(site, lane)
            if region is None:
                raise RuntimeError("the region is inactive, so nothing would be measured")
            region.enter(h)
            with region.saving():
                h = h.sin()
            region.end()
        return h

    def finish(self) -> None:
        """Check that all saved tensors were offloaded."""
        moved = self.engine.finish_step()
        if moved.d2h_bytes != self.regions * SAVED_BYTES:
            raise RuntimeError(f"{moved.d2h_bytes} bytes were offloaded, but {self.regions * SAVED_BYTES} were saved")


class MegatronChain(PlainChain):
    """The chain with a region of Megatron-Core's own engine around each op."""

    name = "Megatron-Core"

    def __init__(self, regions: int) -> None:
        super().__init__(regions)
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        if not torch.distributed.is_initialized():  # after the first step, the engine reduces a summary across ranks
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.interface = module.FineGrainedActivationOffloadingInterface
        self.interface.reset_instance()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the output of the chain for `h`."""
        self.interface.init_chunk_handler(1, None, 0)
        for _ in range(self.regions):
            with self.interface(True, h, "core_attn") as h:  # noqa: FBT003 - Megatron's signature
                out = h.sin()
            h = self.interface.group_commit(out, name="core_attn", forced_released_tensors=[])
        return h

    def finish(self) -> None:
        """End the step of Megatron-Core's engine."""
        self.interface.reset()


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.accelerator.synchronize()


def run_once(chain: PlainChain, x: torch.Tensor, profile: cProfile.Profile | None = None) -> float:
    """Return the CPU seconds of one forward and backward."""
    synchronize(x.device.type)
    begin = time.perf_counter()
    if profile:
        profile.enable()
    output = chain.forward(x * 2)
    output.backward(output.detach())
    if profile:
        profile.disable()
    seconds = time.perf_counter() - begin
    synchronize(x.device.type)
    del output
    chain.finish()
    return seconds


def main() -> None:
    """Run the systems alternately and print the CPU time of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regions", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--megatron", action="store_true", help="also run Megatron-Core's own engine")
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    arguments = parser.parse_args()
    if arguments.megatron:
        os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(SAVED_BYTES // 4, device=device).requires_grad_()
    chains = [PlainChain(arguments.regions), OurChain(arguments.regions, device)]
    if arguments.megatron:
        chains.append(MegatronChain(arguments.regions))
    seconds: dict[str, list[float]] = {chain.name: [] for chain in chains}
    for repeat in range(arguments.repeats + 5):
        for chain in chains:
            x.grad = None
            taken = run_once(chain, x)
            if repeat >= 5:
                seconds[chain.name].append(taken)
    report(seconds, arguments.regions, device)
    if arguments.profile:
        report_profile(chains[1], x)


def report(seconds: dict[str, list[float]], regions: int, device: str) -> None:
    """Print a table with a row for each system."""
    plain = seconds["no regions"]
    table = Table(title=f"CPU time of a region, {SAVED_BYTES >> 20} MiB saved, {regions} regions, {device}")
    for column in ("system", "p20 us", "p50 us", "p80 us"):
        table.add_column(column, justify="left" if column == "system" else "right")
    table.add_row("no regions (total)", *(f"{1e6 * each / regions:.1f}" for each in quantiles(plain)))
    for name, taken in seconds.items():
        if name != "no regions":
            added = [one - other for one, other in zip(taken, plain, strict=True)]
            table.add_row(name, *(f"{1e6 * each / regions:.1f}" for each in quantiles(added)))
    Console(width=100).print(table)


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Return p20, p50 and p80 of `values`."""
    tenths = statistics.quantiles(values, n=10)
    return tenths[1], statistics.median(values), tenths[7]


def report_profile(chain: PlainChain, x: torch.Tensor) -> None:
    """Print the functions of `chain` with the most CPU time."""
    # Autograd runs backward of CUDA tensors on its own thread, which cProfile includes since Python 3.12.
    profile = cProfile.Profile()
    for _ in range(20):
        x.grad = None
        run_once(chain, x, profile)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
