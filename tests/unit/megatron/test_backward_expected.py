"""Tests that the engine is notified once per microbatch, after the last layer, that backward follows."""

import pytest
from support.trainings import DENSE, make_config, make_trainer

from fgoffload import Action, OffloadConfig, OffloadPlan, PlanError, Site
from fgoffload.engine import OffloadEngine

pytestmark = pytest.mark.usefixtures("parallel")


@pytest.fixture
def groups(monkeypatch):
    """Record the number of groups in the microbatch whenever the engine expects its backward."""
    found: list[int] = []
    original = OffloadEngine.expect_backward

    def expect_backward(self, lane, **options):
        found.append(len(lane.groups))
        original(self, lane, **options)

    monkeypatch.setattr(OffloadEngine, "expect_backward", expect_backward)
    return found


@pytest.mark.parametrize(("flags", "layers"), [(DENSE, 2), (f"{DENSE} --mtp-num-layers 1", 3)], ids=["layers", "mtp"])
def test_the_engine_expects_backward_once_per_microbatch_after_the_last_layer(groups, flags, layers):
    with make_trainer(flags, make_config("core_attn")) as trainer:
        trainer.run_step()
        assert groups == [layers] * trainer.arguments.num_microbatches


@pytest.mark.parametrize("window_bytes", [None, 4096])
def test_the_loss_window_of_the_plan_reaches_the_engine(monkeypatch, tmp_path, window_bytes):
    windows = []
    monkeypatch.setattr(OffloadEngine, "expect_backward", lambda self, lane, *, window_bytes: windows.append(window_bytes))
    plan = OffloadPlan(
        actions={Site(chunk=0, layer=layer, tag="core_attn"): Action.OFFLOAD for layer in range(2)},
        loss_window_bytes=window_bytes,
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert OffloadPlan.load(path) == plan
    with make_trainer(DENSE, OffloadConfig(offload_modules=(), offload_plan=path, min_offloaded_tensor_size=64)) as trainer:
        trainer.run_step()
        assert windows == [window_bytes] * trainer.arguments.num_microbatches


def test_exceeding_the_microbatches_of_a_plan_mid_run_warns_once(tmp_path, caplog):
    actions = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}
    config = OffloadConfig(offload_modules=(), offload_plan=tmp_path / "plan.json", min_offloaded_tensor_size=64)
    config.offload_plan.write_text(OffloadPlan(actions=actions, made_for={"microbatches": 1}).to_json(), encoding="utf-8")
    with make_trainer(f"{DENSE} --global-batch-size 4 --rampup-batch-size 2 2 2", config) as trainer:
        for _ in range(4):
            trainer.run_step()
    found = [record.message for record in caplog.records if "microbatches" in record.message]
    assert [message.partition(". ")[0] for message in found] == [
        f"--offload-plan {config.offload_plan}: The plan was made for microbatches 1, but this training run has 2"
    ]
    assert found[0].endswith("The run continues, but may exceed the memory budget.")


def test_a_plan_for_fewer_microbatches_is_rejected_in_the_first_step(tmp_path):
    actions = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}
    path = tmp_path / "plan.json"
    path.write_text(OffloadPlan(actions=actions, made_for={"microbatches": 1}).to_json(), encoding="utf-8")
    with (
        make_trainer(DENSE, OffloadConfig(offload_modules=(), offload_plan=path)) as trainer,
        pytest.raises(
            PlanError, match=r"^--offload-plan .*: The plan was made for microbatches 1, but this training run has 2"
        ),
    ):
        trainer.run_step()
