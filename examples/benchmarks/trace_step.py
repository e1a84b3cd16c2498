"""Traces one training step on a GPU, and plots its copies and kernels over time.

    python examples/benchmarks/trace_step.py [--layers 6] [--hidden 8192] [--tokens 8192] [--out FOLDER]

The model is a stack of blocks in bfloat16, each with a norm, two wide linears and a residual connection. The script offloads
the saved tensors of the second linear. It writes `trace.json` for https://ui.perfetto.dev, and `trace.png`, which shows the
kernels and copies of the same step in lanes. It needs a CUDA GPU.

Expected output: a table with the bytes and durations of the copies. The plot shows that copies to the host run in parallel with
the kernels of forward, and copies to the device in parallel with the kernels of backward.
"""

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.patches import Patch
from rich.console import Console
from trace_events import Event, is_copy, is_kernel, read_events

import fgoffload
from fgoffload.benchmark.traces import write_trace

LANES = {"kernels": "#4c72b0", "copies to the host": "#dd8452", "copies to the device": "#55a868"}
"""Lanes of the plot from top to bottom, with their colors."""


class Block(torch.nn.Module):
    """A pre-norm MLP block, from `[tokens, hidden]` to `[tokens, hidden]`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden, bias=False)
        self.act = torch.nn.GELU()
        self.down = torch.nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return h + self.down(self.act(self.up(self.norm(h))))


def train_step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Run forward and backward, and discard the gradients."""
    model(x).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def run_to_end(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Run a step, and wait until the device has finished it."""
    train_step(model, x)
    torch.cuda.synchronize()


def find_lane(event: Event) -> str | None:
    """Return the plot lane of a trace event, or None if the event is neither a kernel nor a copy."""
    if is_kernel(event):
        return "kernels"
    if is_copy(event, way="DtoH"):
        return "copies to the host"
    if is_copy(event, way="HtoD"):
        return "copies to the device"
    return None


def draw(trace: Path, picture: Path, *, title: str) -> None:
    """Plot the kernels and copies of `trace` over time."""
    lanes: dict[str, list[tuple[float, float]]] = {name: [] for name in LANES}
    for event in read_events(trace):
        lane = find_lane(event)
        if lane is not None:
            lanes[lane].append((event["ts"] / 1e3, event["dur"] / 1e3))
    begin = min(start for spans in lanes.values() for start, _ in spans)
    figure, axes = pyplot.subplots(figsize=(11, 2.6), layout="constrained")
    for row, (name, color) in enumerate(LANES.items()):
        axes.broken_barh([(start - begin, width) for start, width in lanes[name]], (-row - 0.4, 0.8), facecolors=color)
    axes.set_yticks([-row for row in range(len(LANES))], list(LANES))
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend(
        handles=[
            Patch(color=color, label=f"{name}: {sum(width for _, width in lanes[name]):.1f} ms")
            for name, color in LANES.items()
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        ncols=3,
        frameon=False,
    )
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Train a few steps and trace the last one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("trace_step.py needs a CUDA GPU, but torch finds none.")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(arguments.hidden) for _ in range(arguments.layers))).to("cuda", torch.bfloat16)
    x = torch.randn(arguments.tokens, arguments.hidden, device="cuda", dtype=torch.bfloat16)
    config = fgoffload.TransferConfig(is_timed=True)
    with fgoffload.offload(model, {"*.down": "mlp_fc2"}, config) as handle:
        for _ in range(4):
            train_step(model, x)
            handle.stats()
        arguments.out.mkdir(parents=True, exist_ok=True)
        trace = arguments.out / "trace.json"
        write_trace(lambda: run_to_end(model, x), trace)
        Console(width=160).print(handle.stats())
    title = (
        f"One step, {arguments.layers} blocks of hidden {arguments.hidden}, {arguments.tokens} tokens, bf16, "
        f"{torch.cuda.get_device_name()}"
    )
    draw(trace, arguments.out / "trace.png", title=title)


if __name__ == "__main__":
    main()
