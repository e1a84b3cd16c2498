"""A GPT script on the entry points of `megatron.training`, for wheels of megatron-core, which lack pretrain_gpt.py.

    fgoffload run -- tests/gpu/pretrain_own.py FLAGS

Megatron's own parser reads the flags, and the tokens are random.

What you should see: fgoffload's line with the active tags, and Megatron's log with a loss for each step.
"""

import torch
from megatron.core.datasets import utils
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class RandomTokens(torch.utils.data.Dataset):
    """Random but reproducible sequences of tokens."""

    def __init__(self, count: int, seq_length: int, vocab_size: int) -> None:
        self._count, self._seq_length, self._vocab_size = count, seq_length, vocab_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self._vocab_size, (self._seq_length + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def make_datasets(counts):
    """Return the datasets for training, validation and tests; the last two are None."""
    arguments = get_args()
    return RandomTokens(counts[0], arguments.seq_length, arguments.vocab_size), None, None


def run_forward(batches, model):
    """Run one forward; return its output and the loss function."""
    batch = next(batches)
    tokens, labels = batch["tokens"].cuda(), batch["labels"].cuda()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    # No mask: attention applies the causal mask itself.
    return model(tokens, positions, None, labels=labels), compute_loss


def compute_loss(output):
    """Return the mean loss of a microbatch, and the values that Megatron logs."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


if __name__ == "__main__":
    # Wheels contain the compiled dataset helpers, but not the Makefile that Megatron runs at every start.
    utils.compile_helpers = lambda: None
    parsed = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    container = pretrain_cfg_container_from_args(parsed, gpt_config_from_args(parsed))
    pretrain(container, make_datasets, ModelType.encoder_or_decoder, run_forward)
