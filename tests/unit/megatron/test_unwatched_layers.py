"""Tests that layers without offload cost no host time, but still track the position of backward."""

import pytest
from support.trainings import DENSE, MOE, SHARED, make_config, make_trainer, write_plan

from fgoffload import Action

pytestmark = pytest.mark.usefixtures("parallel")


def test_offloaded_storages_are_released_in_later_layers(tmp_path):
    plan = write_plan(tmp_path / "plan.json", {(0, "mlp_act"): Action.OFFLOAD})
    flags = DENSE.replace("--num-layers 2", "--num-layers 4")
    waiting = []
    with make_trainer(flags, make_config(offload_plan=plan)) as trainer:
        layers = trainer.chunks[0].decoder.layers
        transfers = trainer.integration.engine._transfers
        layers[2].register_forward_pre_hook(lambda module, inputs: waiting.append(transfers.in_flight_bytes))
        # CPU copies finish, and release memory, immediately. This makes the engine treat them as asynchronous.
        trainer.integration.engine.device.has_blocking_copies = False
        trainer.run_step()
    assert waiting
    assert set(waiting) == {0}


UNWATCHED = ("attn_norm", "qkv_linear", "mlp_norm", "router", "expert_fc1", "expert_fc2")


@pytest.mark.parametrize(
    ("model", "tag"),
    [(DENSE, tag) for tag in UNWATCHED[:3]]
    + [(MOE, tag) for tag in UNWATCHED]
    + [(SHARED, "router"), (SHARED, "shared_expert")],
)
def test_layers_without_sites_keep_no_reference_to_offloaded_tensors(model, tag):
    """A storage that another op also saved would count as still referenced when it is reloaded."""
    with make_trainer(model, make_config(tag)) as trainer:
        trainer.run_step()
        trainer.run_step()
        stats = trainer.integration.last_step.tags[tag]
    assert stats.h2d_bytes > 0
    assert stats.held_elsewhere_bytes == 0
