"""What a policy changes in a training, and what it leaves."""

import contextlib
import sys
import types

import pytest
import torch
from support.trainings import MOE

from fgoffload import ConfigError, IntegrationError, OffloadConfig
from fgoffload.integrations.megatron import megatron_engine
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.data import Batches, RandomTokens, TextData
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.integrations.megatron.training_policy import Engine, Kernels, TrainingPolicy, Update

pytestmark = pytest.mark.usefixtures("parallel")

CPU = torch.device("cpu")
FLAGS = f"{MOE} --hidden-dropout 0 --attention-dropout 0"
BATCHES = Batches(seq_length=32, micro_batch_size=2, seed=1)


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


def test_with_an_update_the_next_step_computes_something_else():
    with make_trainer(TrainingPolicy()) as trainer:
        first, second = trainer.run_step(), trainer.run_step()
    assert first.losses != second.losses


@pytest.mark.parametrize(("kernels", "expected"), [(Kernels.DETERMINISTIC, True), (Kernels.FASTEST, False)])
def test_deterministic_algorithms_are_on_only_for_the_policy_that_asks(kernels, expected):
    assert not torch.are_deterministic_algorithms_enabled()
    with make_trainer(TrainingPolicy(kernels=kernels)):
        assert torch.are_deterministic_algorithms_enabled() is expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_random_tokens_are_the_same_objects_in_every_step_and_cover_the_vocabulary():
    tokens = RandomTokens(vocab_size=1000, device=CPU)
    (first,), (again,) = (list(tokens.iterate_microbatches(BATCHES, step=step, count=1)) for step in (0, 5))
    assert first is again
    assert first.tokens.shape == first.labels.shape == first.loss_mask.shape == first.position_ids.shape == (2, 32)
    assert torch.equal(first.tokens[:, 1:], first.labels[:, :-1])
    drawn = torch.cat([one.tokens.flatten() for one in tokens.iterate_microbatches(BATCHES, step=0, count=32)])
    assert 256 < drawn.max() < 1000
    assert drawn.min() >= 0


def test_random_tokens_differ_by_microbatch_seed_and_copy_of_the_model_and_leave_torchs_state():
    tokens = RandomTokens(vocab_size=1000, device=CPU)
    state = torch.get_rng_state()
    places = [(BATCHES, 2), (Batches(seq_length=32, micro_batch_size=2, seed=2), 1)]
    places.append((Batches(seq_length=32, micro_batch_size=2, seed=1, data_parallel_rank=1), 1))
    found = [one.tokens for batches, count in places for one in tokens.iterate_microbatches(batches, step=0, count=count)]
    assert len({tuple(rows.flatten().tolist()) for rows in found}) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_text_and_random_tokens_give_microbatches_of_the_same_shapes_and_types():
    text = TextData(bytes(range(200)), name="test")
    (one,) = text.iterate_microbatches(BATCHES, step=0, count=1)
    (other,) = RandomTokens(vocab_size=256, device=CPU).iterate_microbatches(BATCHES, step=0, count=1)
    for field in ("tokens", "labels", "loss_mask", "position_ids"):
        first, second = getattr(one, field), getattr(other, field)
        assert (first.shape, first.dtype, first.is_contiguous()) == (second.shape, second.dtype, second.is_contiguous())


# Megatron-Core's own engine.


MEGATRON = TrainingPolicy(engine=Engine.MEGATRON)
CORE = OffloadConfig(offload_modules=("core_attn",))


def test_megatrons_engine_is_refused_without_a_gpu():
    with pytest.raises(IntegrationError, match="own offload engine needs a GPU"), make_trainer(MEGATRON, offload=CORE):
        pass


def pretend_a_gpu(monkeypatch, *, reads_switch: bool):
    """Let the checks find a GPU, and a Transformer Engine that read its switch at import, or did not."""
    monkeypatch.setattr(megatron_engine, "needs_cpu_support", lambda: False)
    monkeypatch.setattr(megatron_engine, "has_transformer_engine", lambda: True)
    module = types.ModuleType("transformer_engine.pytorch.cpu_offload")
    module.NVTE_CPU_OFFLOAD_V1 = reads_switch
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpu_offload", module)
    calls = []
    monkeypatch.setattr(megatron_engine, "reset", lambda: calls.append("reset"))
    return calls


def test_megatrons_engine_begins_anew_for_each_model(monkeypatch):
    calls = pretend_a_gpu(monkeypatch, reads_switch=True)
    megatron_engine.prepare(CORE)
    assert calls == ["reset"]


@pytest.mark.parametrize(
    ("reads_switch", "offload", "message"),
    [
        (False, CORE, "needs NVTE_CPU_OFFLOAD_V1=1 before Transformer Engine is imported"),
        (True, OffloadConfig(offload_modules=("expert_fc2",)), "'expert_fc2' is none of Megatron-Core's own modules"),
    ],
)
def test_megatrons_engine_is_refused_where_it_could_not_do_what_is_asked(monkeypatch, reads_switch, offload, message):
    calls = pretend_a_gpu(monkeypatch, reads_switch=reads_switch)
    with pytest.raises((ConfigError, IntegrationError), match=message):
        megatron_engine.prepare(offload)
    assert calls == []


def test_megatrons_engine_reads_no_plan(monkeypatch, tmp_path):
    pretend_a_gpu(monkeypatch, reads_switch=True)
    with pytest.raises(ConfigError, match="reads no plans"):
        megatron_engine.prepare(OffloadConfig(offload_modules=(), offload_plan=tmp_path / "plan.json"))


def test_a_fraction_goes_to_megatrons_config_where_it_has_one():
    config = types.SimpleNamespace(activation_offload_fraction=1.0)
    megatron_engine.choose_fraction(config, 0.5)
    assert config.activation_offload_fraction == 0.5


def test_a_fraction_is_refused_where_megatrons_config_has_none():
    megatron_engine.choose_fraction(types.SimpleNamespace(), 1.0)
    with pytest.raises(
        ConfigError, match=r"--activation-offload-fraction 0\.5: the engine of megatron-core .* has no fraction"
    ):
        megatron_engine.choose_fraction(types.SimpleNamespace(), 0.5)
