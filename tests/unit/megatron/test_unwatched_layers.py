"""Layers of which nothing leaves cost the host nothing, and say that backward is on its way."""

from collections.abc import Callable

import pytest
from support.trainings import DENSE, MOE, SHARED, make_config, make_trainer, train, write_plan

from fgoffload import Action
from fgoffload.engine import ActivationLedger, OffloadEngine
from fgoffload.integrations.megatron.offload import MegatronOffload

pytestmark = pytest.mark.usefixtures("parallel")

STEPS = 2


def list_watched(monkeypatch: pytest.MonkeyPatch, method: str = "watch") -> list[object]:
    watched: list[object] = []
    original = getattr(OffloadEngine, method)
    monkeypatch.setattr(OffloadEngine, method, lambda self, lane: watched.append(lane) or original(self, lane))
    return watched


def test_only_layers_that_move_something_are_watched(monkeypatch, tmp_path):
    flags = DENSE
    before, _ = train(flags)
    plan = write_plan(tmp_path / "plan.json", {(0, "core_attn"): Action.OFFLOAD, (0, "attn_proj"): Action.OFFLOAD})
    watched = list_watched(monkeypatch)
    after, moved = train(flags, make_config(offload_plan=plan))
    microbatches = len(watched)
    assert after == before
    assert moved["core_attn"] > 0
    with make_trainer(flags, None) as trainer:
        assert microbatches == STEPS * trainer.arguments.num_microbatches


def test_a_plan_that_moves_nothing_watches_nothing(monkeypatch, tmp_path):
    before, _ = train(DENSE)
    plan = write_plan(tmp_path / "plan.json", {(0, "core_attn"): Action.RECOMPUTE, (1, "core_attn"): Action.KEEP})
    watched = list_watched(monkeypatch)
    after, _ = train(DENSE, make_config(offload_plan=plan))
    assert after == before
    assert watched == []


FOLLOWING = ("announce_backward", "poll", "keep_recomputed", "flush", "watch", "follow")
"""What the engine is told of a layer, and what it does for one, where something may leave."""


def list_followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    followed: list[str] = []
    for method in FOLLOWING:
        monkeypatch.setattr(OffloadEngine, method, note_calls(followed, method, getattr(OffloadEngine, method)))
    return followed


def note_calls(followed: list[str], name: str, original: Callable[..., object]) -> Callable[..., object]:
    def call(*args, **options):
        followed.append(name)
        return original(*args, **options)

    return call


def run_again_without_offload(tmp_path):
    units = ("attn_norm", "mlp_norm", "core_attn")
    return write_plan(tmp_path / "plan.json", {(layer, unit): Action.RECOMPUTE for layer in (0, 1) for unit in units})


def test_a_plan_that_moves_nothing_follows_nothing(monkeypatch, tmp_path):
    before, _ = train(MOE)  # whose dispatcher lets the host wait
    followed = list_followed(monkeypatch)
    after, _ = train(MOE, make_config(offload_plan=run_again_without_offload(tmp_path)))
    assert after == before
    assert followed == []


def test_a_plan_that_moves_something_is_followed(monkeypatch, tmp_path):
    followed = list_followed(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", {(0, "mlp_norm"): Action.RECOMPUTE, (1, "core_attn"): Action.OFFLOAD})
    train(MOE, make_config(offload_plan=plan))
    assert set(followed) >= {"announce_backward", "poll", "keep_recomputed", "flush"}


def test_a_plan_that_moves_nothing_is_followed_while_somebody_looks(monkeypatch, tmp_path):
    followed = list_followed(monkeypatch)
    with make_trainer(MOE, make_config(offload_plan=run_again_without_offload(tmp_path))) as trainer:
        trainer.run_step()
        assert followed == []
        with trainer.observe(ActivationLedger(parameters=trainer.parameters())):
            trainer.run_step()
    assert set(followed) >= {"watch", "keep_recomputed"}


def test_what_left_is_let_go_of_in_the_layers_behind_it(tmp_path):
    plan = write_plan(tmp_path / "plan.json", {(0, "mlp_act"): Action.OFFLOAD})
    flags = DENSE.replace("--num-layers 2", "--num-layers 4")
    waiting = []
    with make_trainer(flags, make_config(offload_plan=plan)) as trainer:
        layers = trainer.chunks[0].decoder.layers
        transfers = trainer.integration.engine._transfers
        layers[2].register_forward_pre_hook(lambda module, inputs: waiting.append(transfers.in_flight_bytes))
        # A copy of the CPU is done at once, and lets go at once too: here it looks as if it took its time.
        trainer.integration.engine.device.has_blocking_copies = False
        trainer.run_step()
    assert waiting
    assert set(waiting) == {0}


@pytest.mark.parametrize(
    ("model", "tags", "watched_layers", "watched_attentions"),
    [
        (MOE, ("expert_fc1", "moe_act"), 0, 0),
        (MOE, ("core_attn", "attn_proj", "expert_fc1"), 0, 2),
        (MOE, ("attn_norm", "qkv_linear"), 0, 0),
        (MOE, ("router", "expert_fc1"), 0, 0),
        (MOE, ("router", "core_attn"), 2, 0),
        (SHARED, ("router",), 2, 0),
        (SHARED, ("shared_expert",), 2, 0),
    ],
)
def test_of_a_layer_only_that_part_is_watched_whose_ops_share_what_leaves(
    monkeypatch, model, tags, watched_layers, watched_attentions
):
    flags = model.replace("--global-batch-size 4", "--global-batch-size 2")
    before, _ = train(flags, steps=1)
    watched = list_watched(monkeypatch)
    entered: list[int] = []
    original = MegatronOffload.watch_layer

    def count(self, *arguments, **options):
        so_far = len(watched)
        context = original(self, *arguments, **options)
        entered.append(len(watched) - so_far)
        return context

    monkeypatch.setattr(MegatronOffload, "watch_layer", count)
    after, moved = train(flags, make_config(*tags), steps=1)
    assert after == before
    assert all(moved[tag] > 0 for tag in tags if tag != "attn_proj")
    assert sum(entered) == watched_layers
    assert len(watched) - sum(entered) == watched_attentions


def test_a_layer_whose_router_leaves_is_followed_and_not_looked_through(monkeypatch):
    flags = MOE.replace("--global-batch-size 4", "--global-batch-size 2")
    before, _ = train(flags, steps=1)
    followed, watched = list_watched(monkeypatch, "follow"), list_watched(monkeypatch)
    after, moved = train(flags, make_config("router"), steps=1)
    assert after == before
    assert moved["router"] > 0
    assert (len(followed), len(watched)) == (2, 0)


NOT_WATCHED = ("attn_norm", "qkv_linear", "mlp_norm", "router", "expert_fc1", "expert_fc2")


@pytest.mark.parametrize(
    ("model", "tag"),
    [(DENSE, tag) for tag in NOT_WATCHED[:3]]
    + [(MOE, tag) for tag in NOT_WATCHED]
    + [(SHARED, "router"), (SHARED, "shared_expert")],
)
def test_no_op_holds_what_leaves_because_nothing_watches_it(model, tag):
    """What another op saved as well would still be there when it comes back, and be counted so."""
    with make_trainer(model, make_config(tag)) as trainer:
        trainer.run_step()
        trainer.run_step()
        stats = trainer.integration.last_step.tags[tag]
    assert stats.h2d_bytes > 0
    assert stats.held_elsewhere_bytes == 0
