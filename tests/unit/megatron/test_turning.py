"""Where forward of the model is over, the engine hears of it once, behind all layers."""

import types

import pytest
import torch
from support.trainings import DENSE, make_config, make_trainer

from fgoffload import Action, OffloadConfig, OffloadPlan, Site
from fgoffload.engine import OffloadEngine
from fgoffload.integrations.megatron.layers import _find_ending_block
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


def test_where_layers_of_multi_token_prediction_have_a_stage_of_their_own_no_backward_is_expected_behind_them():
    block, decoder = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for model, expected in (
        (types.SimpleNamespace(decoder=decoder, post_process=True), decoder),
        (types.SimpleNamespace(decoder=decoder, mtp=block, post_process=True), block),
        (types.SimpleNamespace(decoder=decoder, mtp=block, post_process=False), None),
        (types.SimpleNamespace(decoder=decoder, post_process=False), None),
    ):
        assert _find_ending_block(model) is expected


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
