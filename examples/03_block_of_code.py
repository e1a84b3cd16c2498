"""A block of code: offload all tensors that autograd saves inside a `with` block. Backward can run inside the block too.

    python examples/03_block_of_code.py

Expected output: the losses of three steps, which are bitwise identical with and without offload, then the offloaded bytes, and
finally 0 B of host memory in use.
"""

import torch
from torch import nn

import fgoffload
from fgoffload.units import format_bytes


def main() -> None:
    """Train two identical models, the second one inside an offload block."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses: dict[bool, list[float]] = {}
    # Create the block once and reuse it, since pinning host memory takes longer than a step.
    block = fgoffload.saved_tensors(group_bytes=4 * fgoffload.MIB, device=device)
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        losses[is_offloaded] = []
        for _ in range(3):
            batch = torch.randn(1024, 512, device=device)
            with block if is_offloaded else torch.enable_grad():
                loss = (model(batch) - batch.sin()).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_offloaded].append(loss.item())
    for plain, offloaded in zip(losses[False], losses[True], strict=True):
        print(f"loss {plain:.6f}, offloaded {offloaded:.6f}, equal: {plain == offloaded}")
    stats = block.stats()
    print(f"{format_bytes(stats.d2h_bytes)} to the host in {stats.tags['saved'].groups} groups")
    print(f"host memory in use: {format_bytes(stats.host_bytes)}")
    block.close()


if __name__ == "__main__":
    main()
