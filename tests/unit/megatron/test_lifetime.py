"""Tests models created before `apply`, used after `remove`, closed or partly frozen: identical results or immediate errors."""

import gc
import weakref

import pytest
import torch
from support.trainings import DENSE, MIXED, MIXED_TAGS, make_config, make_trainer, train, write_plan

from fgoffload import Action, IntegrationError
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings

pytestmark = pytest.mark.usefixtures("parallel")

R, O = Action.RECOMPUTE, Action.OFFLOAD  # noqa: E741 - as in the plans below


def freeze(trainer, *trained):
    """Freeze all parameters except those whose names contain one of `trained`."""
    for name, parameter in trainer.named_parameters():
        parameter.requires_grad_(any(word in name for word in trained))


@pytest.mark.parametrize(
    ("plan", "trained"),
    [
        ({(0, "mlp"): R}, ("layers.0.mlp",)),
        ({(1, "moe"): R}, ("layers.1.mlp",)),
        ({(1, "shared_expert"): R}, ("shared_experts",)),
        ({(0, "attn_norm"): R, (0, "mlp_norm"): R, (1, "mlp_norm"): R}, ("layers",)),
        ({(0, "core_attn"): R, (1, "core_attn"): R}, ("linear_proj",)),
        ({(0, "layer"): R, (1, "layer"): R}, ("layers.0", "layers.1.mlp")),
    ],
    ids=str,
)
def test_recomputed_units_after_frozen_parameters_keep_all_gradients(plan, trained, tmp_path):
    path = write_plan(tmp_path / "plan.json", plan)
    expected = run_backward(None, *trained)
    found = run_backward(make_config(offload_plan=path), *trained)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert expected[1]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def run_backward(offload, *trained):
    """Return the loss of one microbatch without Megatron's schedules, and the gradients of the trained parameters by name."""
    # Without the auxiliary loss of experts, whose scale only Megatron's schedules set.
    flags = MIXED.replace("--normalization RMSNorm", "").replace("--moe-aux-loss-coeff 1e-2", "")
    with make_trainer(flags, offload) as trainer:
        freeze(trainer, *trained)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 256, (2, 32), generator=generator)
        model = trainer.chunks[0]
        torch.manual_seed(4)
        with ignore_expected_warnings():
            loss = model(tokens, torch.arange(32).expand(2, 32), None, labels=tokens).sum()
            loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
                gradients[name] = gradient.clone()
        return loss.item(), gradients


def test_training_continues_without_offload_after_remove():
    expected = train(MIXED, steps=2)[0]
    with make_trainer(MIXED, make_config(*MIXED_TAGS)) as trainer:
        first = trainer.run_step()
        config = trainer.chunks[0].config
        assert config.fine_grained_activation_offloading
        trainer.integration.remove()
        assert not config.fine_grained_activation_offloading
        for layer in trainer.chunks[0].decoder.layers:
            assert not layer.offload_mlp_norm
            assert not layer.self_attention.offload_core_attention
        second = trainer.run_step()
    assert [(result.losses, result.gradient_digests) for result in (first, second)] == expected


def test_every_forward_with_a_config_created_before_apply_raises():
    with make_trainer(DENSE, None) as trainer:
        offload = megatron.apply(make_config("core_attn"))
        try:
            for _ in range(2):
                with pytest.raises(
                    IntegrationError, match="TransformerConfig was created before activation offload was applied"
                ):
                    trainer.run_step()
        finally:
            offload.remove()


@pytest.mark.parametrize("flags", [MIXED, f"{MIXED} --moe-token-dispatcher-type alltoall", f"{DENSE} --mtp-num-layers 1"])
@pytest.mark.parametrize("tags", [(), ("core_attn",)])
def test_closing_the_trainer_frees_the_model(flags, tags):
    with make_trainer(flags, make_config(*tags) if tags else None) as trainer:
        trainer.run_step()
        model = weakref.ref(trainer.chunks[0])
    gc.collect()
    assert model() is None
