"""Tests training with real Megatron-Core models and schedules: results are reproducible."""

import os

import pytest
import torch
from support.pipeline import run_pipeline
from support.trainings import DENSE, EXPERTS, MOE, make_trainer, train

from fgoffload.errors import ConfigError, StateError

pytestmark = pytest.mark.usefixtures("parallel")


@pytest.mark.parametrize("flags", [DENSE, MOE, f"{MOE} --bf16"], ids=["dense", "moe", "moe-bf16"])
def test_trainers_with_the_same_seed_are_bitwise_identical(flags):
    first = train(flags)
    torch.rand(5)  # earlier random state must not matter
    assert first == train(flags) != train(f"{flags} --seed 7")


def test_close_restores_the_environment():
    def read_state():
        symbols = torch.zeros, torch.cuda.current_device, torch.are_deterministic_algorithms_enabled()
        return symbols, {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}

    before = read_state()
    with make_trainer(DENSE, None) as trainer:
        trainer.close()
    assert read_state() == before
    with pytest.raises(StateError, match="this trainer is closed"):
        trainer.run_step()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{DENSE} --fp16", "--fp16, which needs loss scaling, is not supported in this version: use --bf16"),
        (f"{DENSE} --fp8-param-gather --fp8-format hybrid", "--fp8-param-gather, which needs an FP8 optimizer"),
        (f"{MOE} --moe-grouped-gemm", "--moe-grouped-gemm needs Transformer Engine's layers: use --transformer-impl"),
        (
            DENSE.replace("--disable-bias-linear", "--recompute-granularity selective --recompute-modules mlp"),
            "--recompute-modules mlp hangs in backward if linear layers have biases",
        ),
    ],
)
def test_flags_that_the_trainer_does_not_support_are_rejected(flags, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(flags, None)


# No dropout: its masks are drawn in execution order, which differs between layouts.
PIPELINE_FLAGS = f"{DENSE} {EXPERTS} --num-layers 4 --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0"
UNTIED_FLAGS = f"{PIPELINE_FLAGS} --untie-embeddings-and-output-weights"
LAYOUTS = {
    "1f1b": "--pipeline-model-parallel-size 2",
    "interleaved": "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def one_process():
    return run_pipeline(UNTIED_FLAGS.split(), processes=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_pipeline_stages_are_bitwise_identical_to_one_process(layout, one_process):
    stages = run_pipeline([*UNTIED_FLAGS.split(), *LAYOUTS[layout].split()], processes=2)
    assert stages[0].losses == [[], []]
    assert stages[1].losses == one_process.losses
    assert [len(losses) for losses in one_process.losses] == [4, 4]
    assert join_digests(stages) == one_process.gradient_digests


def join_digests(stages):
    steps = zip(*(stage.gradient_digests for stage in stages), strict=True)
    return [{name: digest for stage in step for name, digest in stage.items()} for step in steps]
