"""Where forward of the model is over, the engine hears of it once, behind all layers."""

import pytest
import torch
from support.trainings import DENSE, make_config, make_trainer

from fgoffload import Action, OffloadConfig, OffloadPlan, PlanError, Site
from fgoffload.engine import OffloadEngine
from fgoffload.integrations.megatron.model_config import read_facts
from fgoffload.integrations.megatron.schedule_call import ScheduleCall

pytestmark = pytest.mark.usefixtures("parallel")


@pytest.fixture
def groups(monkeypatch):
    """Return a list that gets, each time, the groups of the microbatch whose backward is expected."""
    found: list[int] = []
    original = OffloadEngine.expect_backward

    def expect_backward(self, lane, **options):
        found.append(len(lane.groups))
        original(self, lane, **options)

    monkeypatch.setattr(OffloadEngine, "expect_backward", expect_backward)
    return found


@pytest.mark.parametrize(("flags", "layers"), [(DENSE, 2), (f"{DENSE} --mtp-num-layers 1", 3)], ids=["layers", "mtp"])
def test_backward_is_expected_once_a_microbatch_behind_the_last_layer(groups, flags, layers):
    with make_trainer(flags, make_config("core_attn")) as trainer:
        trainer.run_step()
        assert groups == [layers] * trainer.arguments.num_microbatches


@pytest.mark.parametrize("window_bytes", [None, 4096])
def test_what_a_plan_says_may_be_on_its_way_when_the_loss_begins_is_what_the_engine_is_told(
    monkeypatch, tmp_path, window_bytes
):
    told = []
    monkeypatch.setattr(OffloadEngine, "expect_backward", lambda self, lane, *, window_bytes: told.append(window_bytes))
    plan = OffloadPlan(
        actions={Site(chunk=0, layer=layer, tag="core_attn"): Action.OFFLOAD for layer in range(2)},
        loss_window_bytes=window_bytes,
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert OffloadPlan.load(path) == plan
    with make_trainer(DENSE, OffloadConfig(offload_modules=(), offload_plan=path, min_offloaded_tensor_size=64)) as trainer:
        trainer.run_step()
        assert told == [window_bytes] * trainer.arguments.num_microbatches


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("num_layers", 3),
        ("hidden_size", 8),
        ("num_moe_experts", 4),
        ("pipeline_model_parallel_size", 2),
        ("ffn_hidden_size", 7),
        ("num_query_groups", 1),
        ("kv_channels", 3),
        ("params_dtype_bytes", 2),
        ("fp8_recipe", "delayed"),
        ("q_lora_rank", 7),
        ("tokens", 1),
        ("microbatches", 1),
    ],
)
def test_a_plan_that_was_made_for_another_training_is_refused_with_what_differs(tmp_path, name, planned):
    actions = {Site(chunk=0, layer=layer, tag="core_attn"): Action.OFFLOAD for layer in range(2)}
    config = OffloadConfig(offload_modules=(), offload_plan=tmp_path / "plan.json", min_offloaded_tensor_size=64)
    with make_trainer(DENSE, make_config("core_attn")) as trainer:
        facts = read_facts(trainer.chunks[0].config)
        tokens = trainer.arguments.seq_length * trainer.arguments.micro_batch_size
        microbatches = trainer.arguments.num_microbatches
    facts |= {"tokens": tokens, "microbatches": microbatches}
    config.offload_plan.write_text(OffloadPlan(actions=actions, made_for=facts).to_json(), encoding="utf-8")
    with make_trainer(DENSE, config) as trainer:
        trainer.run_step()
        assert trainer.integration.last_step.d2h_bytes > 0
    wrong = OffloadPlan(actions=actions, made_for={**facts, name: planned})
    config.offload_plan.write_text(wrong.to_json(), encoding="utf-8")
    with (
        make_trainer(DENSE, config) as trainer,
        pytest.raises(PlanError) as caught,
    ):
        trainer.run_step()
    said = f"--offload-plan {config.offload_plan}: The plan was made for {name} {planned}, and this training has {facts[name]}."
    assert str(caught.value).startswith(said)


def test_microbatches_that_grow_beyond_a_plan_in_the_middle_of_a_run_are_warned_of_once(tmp_path, caplog):
    actions = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}
    config = OffloadConfig(offload_modules=(), offload_plan=tmp_path / "plan.json", min_offloaded_tensor_size=64)
    config.offload_plan.write_text(OffloadPlan(actions=actions, made_for={"microbatches": 1}).to_json(), encoding="utf-8")
    with make_trainer(f"{DENSE} --global-batch-size 4 --rampup-batch-size 2 2 2", config) as trainer:
        for _ in range(4):
            trainer.run_step()
    found = [record.message for record in caplog.records if "microbatches" in record.message]
    assert [message.partition(". ")[0] for message in found] == [
        f"--offload-plan {config.offload_plan}: The plan was made for microbatches 1, and this training has 2"
    ]
    assert found[0].endswith("It goes on, and may take more memory than the budget.")


def test_a_block_behind_which_another_one_comes_is_not_the_end(groups):
    with make_trainer(DENSE, make_config("core_attn")) as trainer:
        decoder = trainer.chunks[0].decoder
        trainer.run_step()
        found = len(groups)
        # As in a model with an encoder: a block whose stage is the last, and that is not the model's last.
        trainer.integration.begin_step(ScheduleCall(microbatches=1, tokens=1))
        trainer.integration.note_ending_block(torch.nn.Linear(1, 1))
        trainer.integration.enter_layer(0)
        trainer.integration.leave_block(decoder)
        assert len(groups) == found
        trainer.integration.note_ending_block(decoder)
        trainer.integration.leave_block(decoder)
        assert len(groups) == found + 1
        trainer.integration.finish_open_step()
        trainer.integration.enter_layer(0)
        trainer.integration.leave_block(decoder)  # outside of a schedule, which alone says what comes next
        assert len(groups) == found + 1
