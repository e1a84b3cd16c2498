"""Trains tiny random transformers models with `Trainer`. Imports transformers only on request."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from fgoffload import TransferConfig

ALL = TransferConfig(min_offloaded_bytes=0, window_bytes=0, prefetch_bytes=1 << 16, host_budget_bytes=64 << 20, is_timed=True)
"""Offloads everything."""

LAYERS, VOCABULARY = 3, 64
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
HIDDEN_BYTES = 2 * 16 * 32 * 4
"""Bytes of one layer's fp32 input `[b, s, h]` in a run of `make_trainer`."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests if one of `packages` is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


OLD_NAMES = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")
"""Ignores warnings about `gradient_checkpointing`, the only name that all tested versions have."""


def make_llama(**options: Any) -> Any:
    """Return a Llama with three layers and reproducible weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, **{**SIZES, **options}))


def make_samples(count: int = 16, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return reproducible sequences of random tokens."""
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(model: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    """Return a `Trainer` for four steps on the CPU."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
    )
    return Trainer(model, args, train_dataset=make_samples(), eval_dataset=make_samples(2), callbacks=list(callbacks))


def list_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def copy_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
