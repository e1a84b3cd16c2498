"""transformers' `Trainer`: one callback offloads the activations of all layers.

    python examples/06_trainer.py

Expected output: two runs that log the same losses. The second run also logs the saved memory.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fgoffload.integrations.transformers import OffloadCallback

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 128}


def train(*callbacks: TrainerCallback) -> list[float]:
    """Train three steps and return the loss of each."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (8, 512))]
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    args = TrainingArguments(tempfile.mkdtemp(), disable_tqdm=True, **options)
    trainer = Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(f"losses are bitwise identical: {train() == train(OffloadCallback())}")
