"""Tests the trainer alone: its inputs, its reductions and its errors."""

import contextlib

import pytest
import torch
from support.versions import is_installed

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer.arguments import TrainingArguments, parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.forward_step import find_context_parallel_tokens
from fgoffload.trainer.gradients import get_main_grad
from fgoffload.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("parallel")

DENSE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 2 "
    "--swiglu --disable-bias-linear --lr 1e-2 --hidden-dropout 0 --attention-dropout 0"
)
MOE = f"{DENSE} --num-experts 4 --moe-ffn-hidden-size 32"


@pytest.fixture(scope="module")
def text() -> TextData:
    return TextData.load()


def parse(flags: str, *, world_size: int | None = None) -> TrainingArguments:
    return parse_arguments(flags.split(), source="x.sh", world_size=world_size)


def make_trainer(flags: str, text: TextData) -> contextlib.closing[Trainer]:
    return contextlib.closing(Trainer(parse(flags), text, offload=None))


# Results of a step.


def test_gradients_do_not_accumulate_across_steps() -> None:
    # The text has room for one sequence: every microbatch of every step is the same, and no weight changes.
    only_one = TextData(bytes(range(33)), name="one sequence")
    with make_trainer(DENSE.replace("--lr 1e-2", "--lr 0"), only_one) as trainer:
        first, second, third = (trainer.run_step() for _ in range(3))
    assert first.gradient_digests == second.gradient_digests == third.gradient_digests
    assert first.losses == third.losses


def test_gradients_are_means_over_microbatches_and_tokens() -> None:
    only_one = TextData(bytes(range(33)), name="one sequence")
    gradients = []
    for flags in (
        DENSE,
        DENSE.replace("--global-batch-size 2", "--global-batch-size 1"),
        f"{DENSE} --calculate-per-token-loss",
    ):
        with make_trainer(flags, only_one) as trainer:
            trainer.run_step()
            gradients.append([get_main_grad(parameter).clone() for parameter in trainer.parameters()])
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(one, other)
    assert max(gradient.abs().max().item() for gradient in gradients[0]) > 1e-3


def test_the_optimizer_matches_adamw_on_the_accumulated_gradients(text: TextData) -> None:
    with make_trainer(DENSE, text) as trainer:
        parameters = [parameter.detach().clone().requires_grad_() for parameter in trainer.parameters()]
        trainer.run_step()
        for copy, parameter in zip(parameters, trainer.parameters(), strict=True):
            copy.grad = get_main_grad(parameter).clone()
        torch.optim.AdamW(parameters, lr=1e-2).step()
        for copy, parameter in zip(parameters, trainer.parameters(), strict=True):
            assert torch.equal(copy, parameter)
            assert parameter.grad is None


# Packed and context-parallel sequences.


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_get_the_same_tokens_as_in_megatron(size: int) -> None:
    tokens = torch.arange(64)[None]
    split = load_module("megatron.core.utils").get_batch_on_this_cp_rank
    all_packed = []
    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron.core.parallel_state.get_context_parallel_world_size", lambda: size)
            patch.setattr("megatron.core.parallel_state.get_context_parallel_rank", lambda rank=rank: rank)
            patch.setattr(torch.distributed, "get_world_size", lambda group: size)  # since 0.18
            patch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
            expected = split({"tokens": tokens}, **({"is_hybrid_cp": False} if is_installed("0.18") else {}))["tokens"]
        indices = find_context_parallel_tokens([0, 64], rank=rank, size=size)
        assert torch.equal(tokens.index_select(1, indices), expected)
        # Packed sequences are split one by one.
        packed = find_context_parallel_tokens([0, 32, 48, 64], rank=rank, size=size)
        assert [((packed >= start) & (packed < end)).sum() for start, end in ((0, 32), (32, 48), (48, 64))] == [
            32 // size,
            16 // size,
            16 // size,
        ]
        all_packed.append(packed)
    assert torch.cat(all_packed).sort().values.tolist() == list(range(64))


# Invalid sizes.


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--tensor-model-parallel-size 2", 1, r"one copy of the model needs 2 processes .* but this run has 1\. Start a"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 2, r"needs 4 processes .* but this run has 2\."),
        ("--expert-model-parallel-size 4", 2, r"the experts of a model need 4 processes .* torchrun --nproc-per-node 4"),
        ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2", 2, r"the experts of a model need 4 processes"),
        ("--global-batch-size 3", 2, r"--global-batch-size 3 is not a multiple of .* data-parallel size 2 = 2\. Use 2\."),
        ("--packed-sequences --micro-batch-size 2", 1, r"--micro-batch-size 2 and --packed-sequences are mutually exclusive"),
        ("--rampup-batch-size 1 1", 1, r"--rampup-batch-size 1 1 is not three positive numbers\. Use START, INCREMENT and"),
        ("--rampup-batch-size 1 0 9", 1, r"--rampup-batch-size 1 0 9 is not three positive"),
        ("--rampup-batch-size 1 1 9", 2, r"--rampup-batch-size 1 1 9: START or INCREMENT is not a multiple of .* = 2\."),
        ("--rampup-batch-size 2 1 9", 1, r"--rampup-batch-size 2 1 9 never reaches"),
        ("--global-batch-size 6 --rampup-batch-size 1 2 9", 1, r"never reaches --global-batch-size 6\."),
        ("--seq-length 31 --tensor-model-parallel-size 2 --sequence-parallel", 2, r"--seq-length 31 is not a multiple of 2,"),
        ("--seq-length 34 --context-parallel-size 2", 2, r"--seq-length 34 is not a multiple of 4, the number .* Use 32\."),
    ],
)
def test_incompatible_sizes_are_rejected(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"x\.sh: .*{message}"):
        parse(f"{MOE} {flags}", world_size=world_size)
