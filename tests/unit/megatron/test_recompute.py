"""Tests plans that keep, recompute or offload by site and layer: any mix is bitwise identical."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from support.attention import reference_attention
from support.grouped_experts import grouped_experts
from support.neighbours import (
    ATTENTION,
    GROUPED_MOE_PARTS,
    LATENT_ATTENTION,
    MLP_PARTS,
    MOE_PARTS,
    WHOLE_MLP,
    WHOLE_MOE,
    B,
    K,
    Layer,
    O,
    Plan,
    R,
    design,
    find_missing,
    list_pairs,
    list_rows,
    make_layer,
)
from support.trainings import MIXED, MOE, SHARED, make_config, make_trainer, train, write_plan

from fgoffload import IntegrationError, PlanError
from fgoffload.engine.identity import StorageRef

checkpoints = pytest.importorskip("megatron.core.tensor_parallel.random")

pytestmark = pytest.mark.usefixtures("parallel")

# Local RMS norms consist of plain ops. Around them Megatron's own recompute sums gradients in another order, and a plan's does
# not. Dropout is on, as by default in Megatron: recompute has to draw the same masks.
SELECTIVE = "--recompute-granularity selective --recompute-modules"


class Model(NamedTuple):
    """A model of two layers of different kinds, and the sites that each can have."""

    flags: str
    layers: Sequence[Layer]
    stand_ins: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Replaces modules that need a GPU."""


# A model recomputes a whole layer only where its neighbours differ from those in earlier models.
DENSE_LAYER = make_layer(ATTENTION, WHOLE_MLP, MLP_PARTS)
EXPERT_LAYER = make_layer(ATTENTION, WHOLE_MOE, MOE_PARTS)
GROUPED_LAYER = make_layer(ATTENTION, WHOLE_MOE, GROUPED_MOE_PARTS)[1:]
LATENT_DENSE_LAYER = make_layer(LATENT_ATTENTION, WHOLE_MLP, MLP_PARTS)[1:]
LATENT_EXPERT_LAYER = make_layer(LATENT_ATTENTION, WHOLE_MOE, MOE_PARTS)[1:]
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
MODELS = {
    "dense, experts": Model(MIXED, (DENSE_LAYER, EXPERT_LAYER)),
    "grouped experts, dense": Model(
        f"{MIXED.replace('[0]*1+[1]*1', '[1]*1+[0]*1')} --moe-token-dispatcher-type alltoall",
        (GROUPED_LAYER, DENSE_LAYER),
        grouped_experts,
    ),
    "latent attention": Model(f"{MIXED} {LATENT}", (LATENT_DENSE_LAYER, LATENT_EXPERT_LAYER), reference_attention),
}
PLANS = {name: design(model.layers) for name, model in MODELS.items()}


def train_with_plan(flags, plan, tmp_path):
    tags = sorted({tag for (_, tag), action in plan.items() if action.offloads})
    path = write_plan(tmp_path / "plan.json", plan)
    return train(flags, make_config(*tags, offload_plan=path), steps=1)


@pytest.fixture(scope="module")
def compute_expected(parallel):
    """Return a function that computes and caches a model's results without a plan."""

    @functools.cache
    def compute(name):
        with MODELS[name].stand_ins():
            return train(MODELS[name].flags, steps=1)[0]

    return compute


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=" ".join([name, *(f"{n}.{tag}={a.value}" for (n, tag), a in plan.items() if a is not K)]))
        for name, plans in PLANS.items()
        for plan in plans
    ],
)
def test_every_pair_of_adjacent_actions_is_bitwise_identical(name, plan, compute_expected, tmp_path):
    rows = dict(list_rows(plan))
    with MODELS[name].stand_ins():
        found, sizes = train_with_plan(MODELS[name].flags, rows, tmp_path)
    assert found == compute_expected(name)
    assert {tag for tag, size_bytes in sizes.items() if size_bytes} == {tag for _, tag in rows if offloads_bytes(rows, tag)}


NORM_BEFORE = {"qkv_linear": "attn_norm", "mlp_fc1": "mlp_norm"}


def offloads_bytes(plan: Plan, tag: str) -> bool:
    """Return whether bytes of `tag` are offloaded. Outputs of a recomputed norm are not."""
    offloaded = [layer for (layer, name), action in plan.items() if name == tag and action.offloads]
    if tag == "qkv_linear" and any(name == "mla_up_proj" for _, name in plan):
        return bool(offloaded)  # the compressed query and key-value are offloaded too
    return any(not plan.get((layer, NORM_BEFORE.get(tag, "")), K).recomputes for layer in offloaded)


def test_the_plans_cover_every_pair_of_adjacent_actions():
    for name, model in MODELS.items():
        assert find_missing(list_pairs(model.layers), PLANS[name]) == []


@torch.compiler.set_stance("force_eager")  # the compiler takes longer than the test
def test_recomputing_plain_op_norms_is_bitwise_identical_unlike_megatrons_flags(tmp_path):
    plan = {(layer, unit): R for layer in range(2) for unit in ("attn_norm", "mlp_norm", "core_attn")}
    expected = train(MOE, steps=1)[0]
    assert train_with_plan(MOE, plan, tmp_path)[0] == expected
    assert train(f"{MOE} {SELECTIVE} layernorm core_attn", steps=1)[0] != expected


@pytest.mark.parametrize(("unit", "dispatcher"), [("layer", "allgather"), ("moe", "alltoall")])
def test_recompute_inputs_are_freed_after_backward(unit, dispatcher, monkeypatch, tmp_path):
    # Its gradient is freed too. Dispatchers keep the probabilities of their last forward, and with them their autograd graph.
    leaves, detach = [], checkpoints.detach_variable

    def record_leaves(inputs):
        detached = detach(inputs)
        leaves.extend(StorageRef(one) for one in detached if isinstance(one, torch.Tensor) and one.requires_grad)
        return detached

    path = write_plan(tmp_path / "plan.json", {(0, unit): R, (1, unit): R})
    with make_trainer(f"{MOE} --moe-token-dispatcher-type {dispatcher}", make_config(offload_plan=path)) as trainer:
        monkeypatch.setattr(checkpoints, "detach_variable", record_leaves)
        trainer.run_step()
        assert len(leaves) >= 4  # two layers, two microbatches
        assert all(leaf.is_freed for leaf in leaves)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({(0, "mlp_act"): R}, "0.mlp_act, but this layer's .* do not allow that. The layer can recompute: layer, attn_norm"),
        ({(1, "mlp_fc1"): R}, "1.mlp_fc1, but this layer's .* do not allow that"),
        ({(0, "moe"): R}, "0.moe, but this layer's .* do not allow that"),
        ({(1, "moe_act"): R}, "1.moe_act, but this layer's .* do not allow that"),
        ({(0, "qkv_linear"): R, (0, "core_attn"): R}, "0.qkv_linear and layers.0.core_attn, which overlap"),
        ({(1, "moe"): R, (1, "router"): O}, "1.moe and offloads layers.1.router, but the recompute already drops"),
        ({(1, "core_attn"): B}, "1.core_attn and offloads layers.1.core_attn, but the recompute already drops"),
        ({(1, "layer"): R, (1, "moe"): R}, "1.layer and layers.1.moe, which overlap"),
    ],
    ids=str,
)
def test_plans_that_a_layer_does_not_support_are_rejected_by_site(plan, message, tmp_path):
    path = write_plan(tmp_path / "plan.json", plan)
    tags = sorted({tag for (_, tag), action in plan.items() if action.offloads})
    with (
        make_trainer(MIXED, make_config(*tags, offload_plan=path)) as trainer,
        pytest.raises(PlanError, match=f"^--offload-plan {path}: The plan recomputes layers.{message}"),
    ):
        trainer.run_step()


def test_recompute_in_a_plan_conflicts_with_megatrons_recompute_flags(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "attn_norm"): R})
    with (
        make_trainer(f"{MIXED} {SELECTIVE} core_attn", make_config(offload_plan=path)) as trainer,
        pytest.raises(IntegrationError, match="plan chooses recompute layer by layer, but --recompute-granularity selective"),
    ):
        trainer.run_step()


def test_recomputed_modules_run_twice_only_until_offload_is_removed(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "layer"): R, (1, "shared_expert"): R, (1, "attn_norm"): R})
    calls = []
    with make_trainer(SHARED, make_config(offload_plan=path)) as trainer:
        for number, layer in enumerate(trainer.chunks[0].decoder.layers):
            for name in ("mlp.shared_experts", "self_attention"):
                layer.get_submodule(name).register_forward_pre_hook(lambda *_, call=(number, name): calls.append(call))
        trainer.run_step()
        microbatches = 2
        assert [calls.count((number, "self_attention")) for number in (0, 1)] == [2 * microbatches, microbatches]
        assert [calls.count((number, "mlp.shared_experts")) for number in (0, 1)] == [2 * microbatches] * 2
        calls.clear()
        trainer.integration.remove()
        trainer.run_step()
        assert len(calls) == 2 * 2 * microbatches
