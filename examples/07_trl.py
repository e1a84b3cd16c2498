"""TRL's `SFTTrainer`: its option `activation_offloading=True` uses fgoffload's engine instead of TRL's.

    python examples/07_trl.py

Expected output: two runs that log the same losses, and the bytes that the second run offloaded in its last step.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fgoffload.integrations.trl  # noqa: F401 - replaces TRL's own offload
from fgoffload.units import format_bytes

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 128}


def train(*, activation_offloading: bool) -> SFTTrainer:
    """Train three steps and return the trainer."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    data = Dataset.from_dict({"input_ids": torch.randint(0, 128, (8, 512)).tolist()})
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    args = SFTConfig(tempfile.mkdtemp(), activation_offloading=activation_offloading, bf16=False, disable_tqdm=True, **options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    trainer = SFTTrainer(LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(activation_offloading=False)
    stats = train(activation_offloading=True).maybe_activation_offload_context.handle.last_stats
    print(f"{format_bytes(stats.d2h_bytes)} to the host")
