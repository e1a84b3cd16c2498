"""QLoRA: offload the activations of a model with nf4 weights (bitsandbytes) and LoRA adapters (PEFT).

    python examples/09_qlora.py

Expected output: the training log, which includes the saved memory. Quantized weights are never offloaded.
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fgoffload.integrations.transformers import OffloadCallback

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 128}


def main() -> None:
    """Save a random model, load it in nf4, and train it."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (8, 512))]
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    args = TrainingArguments(folder, disable_tqdm=True, **options)
    Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback()]).train()


if __name__ == "__main__":
    main()
