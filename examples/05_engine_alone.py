"""The engine alone, for authors of integrations: sites, lanes and regions in a small network.

    python examples/05_engine_alone.py

Expected output: three lines. The gradients are bitwise identical. The engine offloads eight storages of 1 MiB, and then reloads
each storage or cancels its offload. At the end, no host memory is in use.
"""

import torch

from fgoffload import Site, TransferPolicy
from fgoffload.engine import Lane, OffloadEngine, find_device
from fgoffload.units import MIB, format_bytes

LAYERS, SIZE = 4, 512  # a matrix of 512 x 512 in fp32 is 1 MiB


def run_forward(weights: list[torch.nn.Parameter], inputs: torch.Tensor, engine: OffloadEngine | None) -> torch.Tensor:
    """Return the sum of the last layer's outputs. With an engine, each layer is a site with the tag `layer`."""
    lane = Lane(chunk=0, microbatch=0)
    hidden = inputs
    for number, weight in enumerate(weights):
        region = None if engine is None else engine.find_region(Site(chunk=0, layer=number, tag="layer"), lane)
        if region is None:
            hidden = torch.nn.functional.silu(hidden @ weight)
            continue
        region.enter(hidden)
        with region.saving():
            output = torch.nn.functional.silu(hidden @ weight)
        region.end(output)
        hidden = output
    return hidden.sum()


def main() -> None:
    """Compare the gradients with and without the engine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(SIZE, SIZE, device=device) / SIZE**0.5) for _ in range(LAYERS)]
    inputs = torch.randn(SIZE, SIZE, device=device) * 2

    run_forward(weights, inputs, None).backward()
    expected = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None

    engine = OffloadEngine(device=find_device(device), policy=TransferPolicy(prefetch_bytes=4 * MIB))
    run_forward(weights, inputs, engine).backward()
    are_equal = all(torch.equal(weight.grad, other) for weight, other in zip(weights, expected, strict=True))

    tag_stats = engine.finish_step().tags["layer"]
    print(f"gradients bitwise identical: {are_equal}")
    print(
        f"offloaded {format_bytes(tag_stats.d2h_bytes)}, reloaded {format_bytes(tag_stats.h2d_bytes)}, "
        f"cancelled {format_bytes(tag_stats.recalled_bytes)}"
    )
    print(f"host memory in use: {format_bytes(engine.arena.used_bytes)}")
    engine.close()


if __name__ == "__main__":
    main()
