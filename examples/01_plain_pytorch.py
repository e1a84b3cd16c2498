"""Any PyTorch model: offload the saved tensors of selected modules until backward needs them.

    python examples/01_plain_pytorch.py

Expected output: an estimate of the savings, a check that the gradients are bitwise identical, and the bytes offloaded per tag.
"""

import torch
from torch import nn

import fgoffload
from fgoffload.units import format_bytes

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 4, 4, 2, 512  # hidden states of 1 MiB in fp32


class Attention(nn.Module):
    """Causal self-attention, from `[b, s, h]` to `[b, s, h]`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the attention output."""
        q, k, v = self.qkv(hidden).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


class Layer(nn.Module):
    """A transformer layer, from `[b, s, h]` to `[b, s, h]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


def get_gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Run one forward and backward pass, and return the gradients."""
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def main() -> None:
    """Print an estimate, compare gradients, and print the statistics."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device)
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    tags = {"*.attn": "attn", "*.mlp": "mlp"}

    print(f"estimate: {fgoffload.estimate_savings(lambda: model(batch), model, tags)}".splitlines()[0])
    expected = get_gradients(model, batch)
    with fgoffload.offload(model, tags) as handle:
        found = get_gradients(model, batch)
        stats = handle.stats()
    print(f"gradients bitwise identical: {all(map(torch.equal, expected, found))}")
    for tag, tag_stats in stats.tags.items():
        print(f"{tag}: {format_bytes(tag_stats.d2h_bytes)} to the host, {tag_stats.groups} groups")


if __name__ == "__main__":
    main()
