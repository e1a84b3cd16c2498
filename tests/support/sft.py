"""A tiny TRL trainer."""

from pathlib import Path
from typing import Any

from support.huggingface import VOCABULARY, make_llama, make_samples


def make_sft_trainer(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    """Return an `SFTTrainer` for three steps on the CPU, with tokenized sequences."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="1", pad_token="2"
    )
    args = SFTConfig(
        **{
            "output_dir": str(folder),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            **options,
        }
    )
    data = Dataset.from_list([{"input_ids": sample["input_ids"].tolist()} for sample in make_samples()])
    return SFTTrainer(model or make_llama(), args, train_dataset=data, processing_class=tokenizer, callbacks=list(callbacks))
