"""Manual offload: a region in a model's own code, and a single tensor.

    python examples/04_by_hand.py

Expected output: the bytes that the region offloads, then two checks: a tensor is on the host, and its reloaded copy is bitwise
identical to the original.
"""

import torch
from torch import nn

import fgoffload
from fgoffload.units import format_bytes


class Model(nn.Module):
    """A network with an offload region in the middle. Without `fgoffload.offload`, the region has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[n, h]` to `[n, h]`."""
        hidden = self.first(hidden)
        with fgoffload.region(hidden, "middle") as region:
            output = torch.nn.functional.gelu(hidden).exp()
            region.end(output)
        return self.last(output)


def main() -> None:
    """Train one step, then offload and reload one tensor."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, batch = Model().to(device), torch.randn(1024, 512, device=device)
    with fgoffload.offload(model) as handle:
        model(batch).mean().backward()
        tag_stats = handle.stats().tags["middle"]
        print(f"the region offloaded {format_bytes(tag_stats.d2h_bytes)} from {tag_stats.saved_tensors} saved tensors")

        tensor = batch.sin()
        expected = tensor.clone()
        offloaded = handle.offload_tensor(tensor)
        del tensor  # the copy in flight now holds the last reference to the device memory
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"on the host: {offloaded.is_on_host}")
        offloaded.prefetch()  # optional: starts the reload early
        print(f"reloaded and bitwise identical: {torch.equal(offloaded.reload(), expected)}")
        del offloaded  # releases the host memory


if __name__ == "__main__":
    main()
