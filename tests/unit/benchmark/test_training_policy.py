"""What a policy changes in a training, and what it leaves."""

import contextlib

import pytest
import torch
from support.trainings import MOE

from fgoffload import IntegrationError, OffloadConfig
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.data import RandomTokens
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.integrations.megatron.training_policy import Engine, TrainingPolicy, Update

pytestmark = pytest.mark.usefixtures("parallel")

CPU = torch.device("cpu")
FLAGS = f"{MOE} --hidden-dropout 0 --attention-dropout 0"


def make_trainer(policy: TrainingPolicy, *, offload: OffloadConfig | None = None) -> contextlib.closing[Trainer]:
    arguments = parse_arguments(FLAGS.split(), source="test")
    tokens = RandomTokens(vocab_size=256, device=CPU)
    return contextlib.closing(Trainer(arguments, tokens, offload=offload, policy=policy))


def test_without_an_update_all_steps_compute_the_same_from_parameters_that_stay():
    with make_trainer(TrainingPolicy(update=Update.NONE)) as trainer:
        before = [parameter.detach().clone() for parameter in trainer.parameters()]
        first, second = trainer.run_step(), trainer.run_step()
        assert all(torch.equal(one, other) for one, other in zip(before, trainer.parameters(), strict=True))
        assert all(parameter.grad is None for parameter in trainer.parameters())
    assert first.losses == second.losses
    assert first.gradient_digests == second.gradient_digests


# Megatron-Core's own engine.


MEGATRON = TrainingPolicy(engine=Engine.MEGATRON)
CORE = OffloadConfig(offload_modules=("core_attn",))


def test_megatrons_engine_is_refused_without_a_gpu():
    with pytest.raises(IntegrationError, match="own offload engine needs a GPU"), make_trainer(MEGATRON, offload=CORE):
        pass
