"""Tests offload in real Megatron-Core models and schedules: bitwise identical results, exact bytes, and errors."""

import contextlib
import dataclasses
import gc

import pytest
import torch
from support.sites import has_hooks
from support.trainings import ATTENTION_TAGS, EXPERTS, HIDDEN_BYTES, make_config, make_trainer, train
from support.trainings import DENSE as ONE_DENSE

from fgoffload import Action, IntegrationError, OffloadConfig, OffloadPlan, PlanError, Site, Tag, default_tags
from fgoffload.engine import ActivationLedger
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings
from fgoffload.trainer.data import TextData

pytestmark = pytest.mark.usefixtures("parallel")

DENSE = ONE_DENSE.replace("--num-layers 2", "--num-layers 4").replace("--global-batch-size 4", "--global-batch-size 6")
MOE = f"{DENSE} {EXPERTS} --moe-layer-freq [0]*1+[1]*3"
MOE_TAGS = (*ATTENTION_TAGS, "expert_fc1", "moe_act")


def test_resident_bytes_after_forward_drop_by_exactly_the_offloaded_bytes():
    resident, offloaded_bytes, referenced_bytes = [], 0, 0
    for offload in (None, make_config(*MOE_TAGS, min_offloaded_tensor_size=0)):
        with make_trainer(MOE, offload) as trainer:
            trainer.run_step()
            batch = TextData.load().get_microbatch(trainer.arguments, step=0, microbatch=0)
            ledger = ActivationLedger(parameters=trainer.parameters())
            with contextlib.ExitStack() as stack:
                if offload:
                    stack.enter_context(trainer.integration.engine.observe(ledger))
                stack.enter_context(ledger.watch())
                stack.enter_context(ignore_expected_warnings())
                loss = trainer.chunks[0](batch.tokens, batch.position_ids, None, labels=batch.labels)
            ledger.sample()
            resident.append(ledger.samples[-1].resident_bytes)
            loss.sum().backward()
            del loss
            if offload:
                stats = trainer.integration.engine.finish_step()
                offloaded_bytes = stats.d2h_bytes
                referenced_bytes = sum(tag.held_elsewhere_bytes for tag in stats.tags.values())
    assert 2 * offloaded_bytes > resident[0]
    assert resident[0] - resident[1] == offloaded_bytes + 4 * 2 * HIDDEN_BYTES - referenced_bytes
    assert referenced_bytes < resident[0] // 100  # routing probabilities, which the router saves too


@pytest.mark.quick
def test_the_number_of_microbatches_may_change_between_steps():
    def run(offload: OffloadConfig | None) -> tuple[list[object], list[int]]:
        results, offloaded_bytes = [], []
        with make_trainer(MOE, offload) as trainer:
            for count in (2, 4, 3):
                trainer.arguments = dataclasses.replace(trainer.arguments, global_batch_size=2 * count)
                result = trainer.run_step()
                results.append((result.losses, result.gradient_digests))
                offloaded_bytes.append(trainer.integration.last_step.tags["core_attn"].d2h_bytes if offload else 0)
        return results, offloaded_bytes

    expected, _ = run(None)
    found, offloaded_bytes = run(make_config(*MOE_TAGS))
    assert found == expected
    assert offloaded_bytes[1] == 2 * offloaded_bytes[0]
    assert 2 * offloaded_bytes[2] == 3 * offloaded_bytes[0]


def test_a_plan_with_an_unknown_site_is_rejected_after_the_first_step(tmp_path):
    path = tmp_path / "plan.json"
    sites = (Site(chunk=0, layer=1, tag="core_attn"), Site(chunk=0, layer=9, tag="core_attn"))
    path.write_text(OffloadPlan(actions=dict.fromkeys(sites, Action.OFFLOAD)).to_json())
    with (
        make_trainer(MOE, make_config("core_attn", offload_plan=path)) as trainer,
        pytest.raises(PlanError, match=r"contains layers\.9\.core_attn in chunk 0, but no rank has this site") as caught,
    ):
        trainer.run_step()
    assert str(caught.value).startswith(f"--offload-plan {path}: The plan contains ")


def test_remove_restores_every_symbol_and_applying_twice_raises():
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, CheckpointWithoutOutputFunction
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    owners = (
        FineGrainedActivationOffloadingInterface,
        CheckpointWithoutOutput,
        CheckpointWithoutOutputFunction,
        SequentialMLP,
        TransformerBlock,
        TransformerLayer,
    )
    before = [dict(vars(owner)) for owner in owners]
    offload = megatron.apply(make_config("core_attn"))
    assert [dict(vars(owner)) for owner in owners] != before
    with pytest.raises(IntegrationError, match="already applied in this process"):
        megatron.apply(make_config("core_attn"))
    megatron.remove(offload)
    assert [dict(vars(owner)) for owner in owners] == before
    megatron.remove(offload)  # has no effect


def test_an_exception_in_a_layer_leaves_no_hooks_and_the_next_step_is_correct():
    from megatron.core.transformer.moe.experts import SequentialMLP

    def fail(module, args):
        raise ValueError("user error")

    expected, _ = train(MOE)
    with make_trainer(MOE, make_config(*MOE_TAGS)) as trainer:
        experts = next(module for module in trainer.chunks[0].modules() if isinstance(module, SequentialMLP))
        state = torch.get_rng_state()
        # Runs before our own hook on this module, while the region of the activation is still open.
        hook = experts.local_experts[1].linear_fc2.register_forward_pre_hook(fail, prepend=True)
        saw_hooks = []
        experts.local_experts[1].linear_fc2.register_forward_pre_hook(lambda *_: saw_hooks.append(has_hooks()), prepend=True)
        with pytest.raises(ValueError, match="user error"):
            trainer.run_step()
        hook.remove()
        assert saw_hooks == [True]
        assert not has_hooks()
        torch.set_rng_state(state)
        results = [trainer.run_step() for _ in range(2)]
        gc.collect()  # the exception and its frames form a reference cycle that keeps the first graph alive
        assert trainer.integration.engine.arena.used_bytes == 0
    assert [(r.losses, r.gradient_digests) for r in results] == expected


def test_a_user_defined_site_with_its_own_tag_is_offloaded():
    config = make_config("loss_head", tags=default_tags().with_tag(Tag(name="loss_head", saves="the final hidden states")))
    offload = megatron.apply(config)
    try:
        offload.begin_microbatch(0)
        x = torch.randn(32, 32, requires_grad=True)
        h = x * 2
        region = offload.find_region("loss_head")
        region.enter(h)
        with region.saving():
            output = h.sin()
        region.end(output)
        output.sum().backward()
        assert torch.equal(x.grad, 2 * (x * 2).cos().detach())
        offload.finish_step()
        assert offload.last_step.tags["loss_head"].d2h_bytes == 32 * 32 * 4
    finally:
        offload.remove()
