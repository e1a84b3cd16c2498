"""Plots the activation memory of a Llama over one step, with and without offload, for docs/how_to/huggingface.md.

    python examples/benchmarks/memory_of_a_step.py images/memory_huggingface.png

Expected output: one line per setting with its activation peak, and the plot as a PNG file. The script runs on a CPU.
"""

import contextlib
import sys

import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

import fgoffload
from fgoffload.engine import ActivationLedger

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 2048}
SETTINGS = {"baseline": None, "MLPs offloaded": ["model.layers.*.mlp"], "layers offloaded": ["model.layers.*"]}


def measure(patterns: list[str] | None) -> list[float]:
    """Return the MiB of activations on the device whenever the second step saves or unpacks a tensor."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 512))
    handle = None if patterns is None else fgoffload.offload(model, patterns)
    model(input_ids=tokens, labels=tokens).loss.backward()  # the first step creates the engine
    ledger = ActivationLedger(parameters=model.parameters())
    engine = None if handle is None else handle.engine
    with ledger.watch(), contextlib.nullcontext() if engine is None else engine.observe(ledger):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return [sample.resident_bytes / fgoffload.MIB for sample in ledger.samples]


def main(path: str) -> None:
    """Measure the settings, print their peaks and plot their memory."""
    axes = (figure := Figure(figsize=(8, 3.6), layout="constrained", facecolor="white")).add_subplot()
    for (name, patterns), color in zip(SETTINGS.items(), ("#8a8f98", "#e08e0b", "#1f77b4"), strict=True):
        found = measure(patterns)
        label = f"{name}: peak {max(found):.0f} MiB"
        print(label)
        places = [100 * place / len(found) for place in range(len(found))]
        axes.plot(places, found, color=color, label=label)
        axes.fill_between(places, found, color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("position in the step, by tensors saved and unpacked [%]")
    axes.set_ylabel("activations on the device [MiB]")
    axes.set(xlim=(0, 100), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
