"""Where forward of the model is over, the engine hears of it once, behind all layers."""

import pytest
from support.trainings import DENSE, make_config, make_trainer

from fgoffload.engine import OffloadEngine

pytestmark = pytest.mark.usefixtures("parallel")


@pytest.fixture
def groups(monkeypatch):
    """Return a list that gets, each time, the groups of the microbatch whose backward is expected."""
    found: list[int] = []
    original = OffloadEngine.expect_backward
    monkeypatch.setattr(
        OffloadEngine, "expect_backward", lambda self, lane: found.append(len(lane.groups)) or original(self, lane)
    )
    return found


@pytest.mark.parametrize(("flags", "layers"), [(DENSE, 2), (f"{DENSE} --mtp-num-layers 1", 3)], ids=["layers", "mtp"])
def test_backward_is_expected_once_a_microbatch_behind_the_last_layer(groups, flags, layers):
    with make_trainer(flags, make_config("core_attn")) as trainer:
        trainer.run_step()
        assert groups == [layers] * trainer.arguments.num_microbatches


def test_behind_a_stage_that_is_not_the_last_no_backward_is_expected(groups):
    with make_trainer(DENSE, make_config("core_attn")) as trainer:
        trainer.chunks[0].decoder.post_process = False
        trainer.chunks[0].decoder.post_layer_norm = False
        trainer.run_step()
    assert groups == []
