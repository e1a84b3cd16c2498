"""Units of Megatron's layers that run again are handed on to what uses them: no copy, no storage, and the same bits."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from support.attention import reference_attention
from support.grouped_experts import grouped_experts
from support.trainings import DENSE, SHARED, make_config, make_trainer, write_plan

from fgoffload import Action, OffloadConfig, OffloadPlan, Site
from fgoffload.engine import CpuDevice
from fgoffload.engine.identity import StorageRef
from fgoffload.integrations.megatron import reruns, training
from fgoffload.integrations.megatron.profiling import StepMeasurement
from fgoffload.units import GIB

pytest.importorskip("megatron.core.transformer.moe.experts")

pytestmark = pytest.mark.usefixtures("parallel")

R, O, B = Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as elsewhere

GROUPED = f"{SHARED} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
LATENT = f"{DENSE} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
FLAGS = {
    "dense": DENSE,
    "grouped": GROUPED,
    "gathered": GROUPED.replace("alltoall", "allgather"),
    "overlapped": f"{GROUPED} --moe-shared-expert-overlap",
    "latent": f"{LATENT} --q-lora-rank 16",
    "latent, plain query": LATENT,
}


@contextlib.contextmanager
def make_planned_trainer(name, actions, tmp_path):
    """Make a trainer whose first layer does so."""
    tags = [tag for tag, action in actions.items() if action.offloads]
    path = write_plan(tmp_path / "plan.json", {(0, tag): action for tag, action in actions.items()})
    with stand_ins(name), make_trainer(FLAGS[name], make_config(*tags, offload_plan=path) if actions else None) as trainer:
        yield trainer


@contextlib.contextmanager
def stand_ins(name):
    """Give Megatron's local layers what they are refused with, until the body ends."""
    attention = reference_attention() if "latent" in name else contextlib.nullcontext()
    with grouped_experts(), mock.patch.object(training, "refuse_what_is_not_built"), attention:
        yield


def get_bits(result):
    return result.losses, result.gradient_digests


@pytest.fixture(scope="module")
def compute_expected(parallel):
    """What computes the bits of a model without a plan, once."""

    @functools.cache
    def compute(name):
        with stand_ins(name), make_trainer(FLAGS[name], None) as trainer:
            return get_bits(trainer.run_step())

    return compute


@pytest.fixture
def given_back(monkeypatch):
    """For each output that ran again, whether something held it and it was copied, and how many stood for it."""
    found, give_back = [], reruns._Output.give_back

    def note(output, again):
        is_held = output._emptied is not None and output._emptied.find_storage() is not None
        found.append((is_held, sum(reference() is not None for reference in output._stand_ins)))
        give_back(output, again)

    monkeypatch.setattr(reruns._Output, "give_back", note)
    return found


@pytest.mark.parametrize(
    ("name", "actions", "count"),
    [
        ("dense", {"attn_norm": R}, 1),
        ("dense", {"qkv_linear": R}, 3),
        ("dense", {"qkv_linear": B, "core_attn": O}, 3),
        ("dense", {"mlp_norm": B}, 1),
        ("dense", {"mlp_norm": R, "mlp_act": O}, 1),
        ("dense", {"attn_norm": R, "qkv_linear": B}, 4),  # whose input is the norm's output, so that nothing leaves
        ("dense", {"mlp_fc1": R}, 1),
        ("dense", {"attn_norm": R, "qkv_linear": R, "mlp_norm": R, "mlp_fc1": R}, 6),
        ("dense", {"mlp_norm": R, "mlp": R}, 1),
        ("grouped", {"mlp_norm": R}, 1),
        ("grouped", {"mlp_norm": R, "dispatch": R, "moe_act": R, "router": O}, 2),
        ("grouped", {"mlp_norm": R, "shared_expert": R, "expert_fc1": R}, 2),
        ("grouped", {"mlp_norm": R, "moe": R}, 1),
        ("grouped", {"moe_act": R}, 1),
        ("grouped", {"expert_fc1": B}, 1),
        ("gathered", {"mlp_norm": R, "moe_act": B}, 2),
        ("overlapped", {"mlp_norm": R}, 1),
        ("latent", {"attn_norm": R, "mla_up_proj": R}, 4),
        ("latent", {"mla_up_proj": R, "core_attn": R}, 3),
        ("latent, plain query", {"attn_norm": R}, 1),
        ("latent, plain query", {"attn_norm": R, "mla_up_proj": R}, 4),
    ],
    ids=str,
)
def test_nothing_is_copied_and_bits_stay(name, actions, count, compute_expected, given_back, tmp_path):
    expected = compute_expected(name)
    with make_planned_trainer(name, actions, tmp_path) as trainer:
        assert get_bits(trainer.run_step()) == expected
        assert not trainer.integration.open_reruns._found
        moved = {tag: numbers.d2h_bytes for tag, numbers in trainer.integration.last_step.tags.items()}
    assert all(moved[tag] for tag, action in actions.items() if action is O)
    microbatches = 2
    assert len(given_back) == count * microbatches
    assert not any(is_held for is_held, _ in given_back)
    assert all(stand_ins for _, stand_ins in given_back)


def test_so_it_is_by_a_plan_that_a_measured_step_gave(compute_expected, given_back):
    # Then sites were put into the layer before anybody knew what runs again.
    units = ("attn_norm", "qkv_linear", "mlp_norm", "moe_act")
    plan = OffloadPlan(actions={Site(chunk=0, layer=0, tag=unit): R for unit in units})
    config = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=GIB, min_offloaded_tensor_size=64)
    expected = compute_expected("grouped")
    with stand_ins("grouped"), make_trainer(GROUPED, config) as trainer:
        integration = trainer.integration
        measurement = StepMeasurement(CpuDevice(), min_offloaded_numel=64, use_plan=integration.use_plan)
        integration.measurement = measurement
        measurement.request()
        assert get_bits(trainer.run_step()) == expected
        measurement.stop_watching()
        assert not given_back
        measurement.apply(plan)
        trainer.run_step()
    assert len(given_back) == 6 * 2
    assert not any(is_held for is_held, _ in given_back)


USERS = {
    "attn_norm": ("dense", "self_attention.linear_qkv"),
    "qkv_linear": ("dense", "self_attention.core_attention"),
    "mlp_norm": ("dense", "mlp.linear_fc1"),
    "mlp_fc1": ("dense", "mlp.linear_fc2"),
    "expert_fc1": ("grouped", "mlp.experts.linear_fc2"),
    "moe_act": ("grouped", "mlp.experts.linear_fc2"),
    "mla_up_proj": ("latent", "self_attention.core_attention"),
}


@pytest.mark.parametrize("unit", USERS)
def test_what_is_handed_on_is_gone_behind_forward_in_the_layers_of_the_plan_alone(unit, tmp_path):
    name, user = USERS[unit]
    with make_planned_trainer(name, {unit: R}, tmp_path) as trainer:
        model = trainer.chunks[0]
        given, gone = [], []
        for layer in model.decoder.layers:
            layer.get_submodule(user).register_forward_pre_hook(lambda _, args: given.append(StorageRef(args[0])))
        model.output_layer.register_forward_pre_hook(lambda *_: gone.append([one.is_freed for one in given[-2:]]))
        trainer.run_step()
    assert gone == [[True, False]] * 2


@pytest.mark.parametrize("unit", USERS)
def test_what_a_hook_changes_in_place_before_its_use_is_kept(unit, tmp_path):
    name, user = USERS[unit]

    def change(_, args):
        args[0].mul_(1.5)

    def train(actions):
        with make_planned_trainer(name, actions, tmp_path) as trainer:
            for layer in trainer.chunks[0].decoder.layers:
                layer.get_submodule(user).register_forward_pre_hook(change)
            return get_bits(trainer.run_step())

    assert train({unit: R}) == train({})


@pytest.mark.parametrize("unit", USERS)
def test_what_a_hook_holds_is_there_again_as_a_copy(unit, compute_expected, given_back, tmp_path):
    name, user = USERS[unit]
    held, before, expected = [], [], compute_expected(name)

    def hold(_, args):
        held.append(args[0].detach())
        before.append(args[0].detach().clone())

    with make_planned_trainer(name, {unit: R}, tmp_path) as trainer:
        trainer.chunks[0].decoder.layers[0].get_submodule(user).register_forward_pre_hook(hold)
        assert get_bits(trainer.run_step()) == expected
    assert any(is_held for is_held, _ in given_back)
    assert all(torch.equal(*pair) for pair in zip(held, before, strict=True))


def test_after_removal_the_users_are_as_they_were(tmp_path):
    with make_planned_trainer("grouped", {"attn_norm": R, "mlp_norm": R, "moe_act": R, "router": O}, tmp_path) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        trainer.run_step()
        users = [layer.self_attention.linear_qkv, layer.mlp.experts.linear_fc2, layer.mlp.shared_experts.linear_fc1]
        assert all("forward" in vars(user) for user in users)
        assert "gating" in vars(layer.mlp.router)
        trainer.integration.remove()
        assert not any("forward" in vars(user) for user in users)
        assert not {"gating", "forward"} & vars(layer.mlp.router).keys()
