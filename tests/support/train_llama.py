"""A training script of a transformers user, without any offload code. Prints its losses as JSON."""

import json
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
)
tokens = torch.randint(0, 64, (8, 512))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
sys.stdout.write(
    json.dumps({"argv": sys.argv[1:], "mode": args.parallel_mode.value, "log": trainer.state.log_history[:-1]}) + "\n"
)
