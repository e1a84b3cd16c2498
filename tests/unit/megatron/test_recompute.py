"""Plans that keep, recompute or offload, site by site and layer by layer: the same bits, whatever the mix."""

import itertools

import pytest
import torch
from support.trainings import HIDDEN_BYTES, MIXED, MOE, SHARED, make_config, make_trainer, train, write_plan

from fgoffload import Action, IntegrationError, PlanError
from fgoffload.engine.identity import StorageRef
from fgoffload.tags import RECOMPUTE_UNITS

checkpoints = pytest.importorskip("megatron.core.tensor_parallel.random")

pytestmark = pytest.mark.usefixtures("parallel")

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in the tables below

# Of a layer norm: the local RMS norm is made of plain ops, and around such a norm Megatron's own recompute sums gradients in
# another order. Dropout is on, as Megatron has it by default: what runs again has to draw the same masks.
NORMED = MIXED.replace("--normalization RMSNorm", "")
SELECTIVE = "--recompute-granularity selective --recompute-modules"

DENSE_CHOICES = {
    "attn_norm": (K, R, O, B),
    "qkv_linear": (K, R, O, B),
    "core_attn": (K, R, O),
    "mlp_norm": (K, R, O, B),
    "mlp_fc1": (K, R, O, B),
    "mlp": (K, R),
    "mlp_act": (K, O),
}
MOE_CHOICES = {
    "attn_norm": (K, R, O, B),
    "qkv_linear": (K, R, O, B),
    "core_attn": (K, R, O),
    "mlp_norm": (K, R, O, B),
    "shared_expert": (K, R, O),
    "moe": (K, R),
    "router": (K, O),
    "expert_fc1": (K, O),
    "moe_act": (K, O),
    "expert_fc2": (K, O),
}


def is_possible(plan: dict[tuple[int, str], Action]) -> bool:
    """Return whether nothing is asked of what runs again as a part of something else."""
    for (layer, name), action in plan.items():
        unit = next((unit for unit in RECOMPUTE_UNITS if unit.name == name), None)
        if (
            unit is not None
            and action.recomputes
            and any(plan.get((layer, tag), K) is not K for tag in unit.covers if tag != name)
        ):
            return False
        if unit is not None and action.recomputes and any(plan.get((layer, other), K).recomputes for other in unit.excludes):
            return False
    return True


def list_pairs() -> list[dict[tuple[int, str], Action]]:
    """Return a plan for each pair of choices of two sites that follow each other in the layers' forward."""
    sites = [((0, tag), choices) for tag, choices in DENSE_CHOICES.items()]
    sites += [((1, tag), choices) for tag, choices in MOE_CHOICES.items()]
    plans = []
    for (one, choices), (other, others) in itertools.pairwise(sites):
        plans += [{one: first, other: second} for first, second in itertools.product(choices, others)]
    return [plan for plan in plans if is_possible(plan)]


def merge(plans: list[dict[tuple[int, str], Action]]) -> list[dict[tuple[int, str], Action]]:
    """Return fewer plans that have all of `plans` in them: pairs of sites that are not neighbours of each other share one."""
    merged: list[dict[tuple[int, str], Action]] = []
    for plan in plans:
        for other in merged:
            both = other | plan
            if all(other.get(site, action) is action for site, action in plan.items()) and is_possible(both):
                other.update(plan)
                break
        else:
            merged.append(dict(plan))
    return merged


def train_with_plan(flags, plan, tmp_path):
    tags = sorted({tag for (_, tag), action in plan.items() if action.offloads})
    path = write_plan(tmp_path / "plan.json", plan)
    return train(flags, make_config(*tags, offload_plan=path), steps=1)


@pytest.fixture(scope="module")
def expected(parallel):
    return train(NORMED, steps=1)[0]


@pytest.mark.parametrize(
    "plan",
    merge(list_pairs()),
    ids=lambda plan: " ".join(f"{layer}.{tag}={action.value}" for (layer, tag), action in plan.items()),
)
def test_every_pair_of_neighbouring_choices_computes_the_same_bits(plan, expected, tmp_path):
    found, moved = train_with_plan(NORMED, plan, tmp_path)
    assert found == expected
    assert {tag for tag, size_bytes in moved.items() if size_bytes} == {tag for _, tag in plan if moves(plan, tag)}


NORM_BEFORE = {"qkv_linear": "attn_norm", "mlp_fc1": "mlp_norm"}


def moves(plan: dict[tuple[int, str], Action], tag: str) -> bool:
    """Return whether something of `tag` leaves: not what a norm that runs again makes."""
    offloaded = [layer for (layer, name), action in plan.items() if name == tag and action.offloads]
    return any(not plan.get((layer, NORM_BEFORE.get(tag, "")), K).recomputes for layer in offloaded)


@pytest.mark.parametrize(
    "neighbour", [{}, {(1, "layer"): R}, {(1, "core_attn"): O}, {(1, "moe"): R}, {(1, "attn_norm"): B}], ids=str
)
@pytest.mark.parametrize("inputs", [K, O])
def test_a_whole_layer_runs_again_beside_any_other_choice(neighbour, inputs, expected, tmp_path):
    plan = {(0, "layer"): R, (0, "layer_input"): inputs, **neighbour}
    found, moved = train_with_plan(NORMED, plan, tmp_path)
    assert found == expected
    assert (moved.get("layer_input", 0) > 0) == (inputs is O)


def test_merged_plans_have_every_pair():
    pairs, merged = list_pairs(), merge(list_pairs())
    assert len(merged) < len(pairs) / 3
    assert all(any(pair.items() <= plan.items() for plan in merged) for pair in pairs)
    assert {action for pair in pairs for action in pair.values()} == set(Action)


def test_a_plan_recomputes_as_megatrons_own_flags_do_where_it_names_all_layers(tmp_path):
    plan = {(layer, unit): R for layer in range(2) for unit in ("attn_norm", "mlp_norm", "core_attn")}
    # The local RMS norm tells: recomputing it changes the order of sums, so only the same recompute gives the same bits.
    with_flags, _ = train(f"{MOE} {SELECTIVE} layernorm core_attn", steps=1)
    assert train_with_plan(MOE, plan, tmp_path)[0] == with_flags
    assert train(MOE, steps=1)[0] != with_flags


def test_a_layer_that_runs_again_keeps_its_input_alone(tmp_path):
    # One layer of two: the other saves as always. What the recomputed layer keeps is its input, which may leave.
    path = write_plan(tmp_path / "plan.json", {(1, "layer"): R, (1, "layer_input"): O})
    flags = NORMED.replace("--position-embedding-type rope", "")
    _, moved = train(flags, make_config(offload_plan=path, min_offloaded_tensor_size=2048))
    assert moved == {"layer_input": HIDDEN_BYTES * 2}


def test_what_recomputes_runs_once_more_in_backward(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "layer"): R, (1, "shared_expert"): R})
    calls = []
    with make_trainer(SHARED, make_config(offload_plan=path)) as trainer:
        layers = trainer.chunks[0].decoder.layers
        for index, layer in enumerate(layers):
            layer.mlp.shared_experts.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
            layer.self_attention.register_forward_pre_hook(lambda *_, index=index: calls.append(f"attention {index}"))
        trainer.run_step()
    microbatches = 2
    assert calls.count(0) == calls.count("attention 0") == 2 * microbatches
    assert calls.count(1) == 2 * microbatches
    assert calls.count("attention 1") == microbatches


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("unit", ["layer", "moe"])
def test_the_leaf_that_a_recompute_begins_with_is_gone_after_backward(unit, dispatcher, monkeypatch, tmp_path):
    # Its gradient goes with it. Dispatchers hold the probabilities of their last forward, and so all that these came from.
    path = write_plan(tmp_path / "plan.json", {(0, unit): R, (1, unit): R})
    flags = f"{MOE} --moe-token-dispatcher-type {dispatcher}"
    with make_trainer(flags, make_config(offload_plan=path)) as trainer:
        leaves = record_leaves(monkeypatch)
        trainer.run_step()
        assert len(leaves) >= 4  # two layers, two microbatches
        assert [leaf.is_freed for leaf in leaves] == [True] * len(leaves)


def test_megatrons_own_full_recompute_lets_go_of_its_leaves_too_beside_offload(monkeypatch):
    flags = f"{MOE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    with make_trainer(flags, make_config("layer_input")) as trainer:
        leaves = record_leaves(monkeypatch)
        trainer.run_step()
        assert [leaf.is_freed for leaf in leaves] == [True] * 4


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    ("recompute", "held"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", True),
        (f"{SELECTIVE} moe", True),
        # No dispatcher is in these.
        (f"{SELECTIVE} shared_experts", False),
    ],
)
def test_without_this_package_dispatchers_hold_the_last_leaf_of_each_layer(recompute, held, dispatcher, monkeypatch):
    # What the planner counts for Megatron's own recompute.
    with make_trainer(f"{SHARED} --moe-token-dispatcher-type {dispatcher} {recompute}", None) as trainer:
        leaves = record_leaves(monkeypatch)
        for _ in range(2):
            leaves.clear()
            trainer.run_step()
            # Two layers, two microbatches: the second forward of a layer lets go of the first leaf.
            assert [leaf.is_freed for leaf in leaves] == [True, True, not held, not held]


def record_leaves(monkeypatch):
    """Return a list that gets a reference to the storage of each hidden state that a checkpoint's backward begins with."""
    leaves = []

    def detach_variable(inputs):
        detached = original(inputs)
        leaves.extend(StorageRef(one) for one in detached if isinstance(one, torch.Tensor) and one.requires_grad)
        return detached

    original = checkpoints.detach_variable
    monkeypatch.setattr(checkpoints, "detach_variable", detach_variable)
    return leaves


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {(0, "mlp_act"): R},
            r"recomputes layers\.0\.mlp_act, which this layer cannot run again by itself.*It can: layer, attn_norm",
        ),
        (
            {(1, "mlp_fc1"): R},
            r"recomputes layers\.1\.mlp_fc1, which this layer cannot run again by itself.*It can: layer, attn_norm",
        ),
        (
            {(0, "qkv_linear"): R, (0, "core_attn"): R},
            r"recomputes layers\.0\.qkv_linear and layers\.0\.core_attn, which cannot both run again by themselves",
        ),
        ({(0, "moe"): R}, r"recomputes layers\.0\.moe, which this layer cannot run again"),
        ({(1, "moe_act"): R}, r"recomputes layers\.1\.moe_act, which this layer cannot run again"),
        (
            {(1, "moe"): R, (1, "router"): O},
            r"recomputes layers\.1\.moe and offloads layers\.1\.router, which saves nothing then",
        ),
        ({(1, "core_attn"): B}, r"recomputes layers\.1\.core_attn and offloads layers\.1\.core_attn, which saves nothing then"),
        ({(1, "layer"): R, (1, "moe"): R}, r"recomputes layers\.1\.layer and layers\.1\.moe, which is a part of it"),
    ],
    ids=str,
)
def test_what_a_layer_cannot_do_is_refused_by_name(plan, message, tmp_path):
    path = write_plan(tmp_path / "plan.json", plan)
    tags = sorted({tag for (_, tag), action in plan.items() if action.offloads})
    with make_trainer(MIXED, make_config(*tags, offload_plan=path)) as trainer, pytest.raises(PlanError, match=message):
        trainer.run_step()


def test_a_plan_that_recomputes_and_megatrons_recompute_flags_are_refused_together(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "attn_norm"): R})
    with (
        make_trainer(f"{MIXED} {SELECTIVE} core_attn", make_config(offload_plan=path)) as trainer,
        pytest.raises(IntegrationError, match="recomputes modules of single layers, and --recompute-granularity selective"),
    ):
        trainer.run_step()


def test_remove_lets_the_layers_run_once_again(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "layer"): R, (1, "attn_norm"): R})
    with make_trainer(NORMED, make_config(offload_plan=path)) as trainer:
        layer = trainer.chunks[0].decoder.layers[1]
        trainer.run_step()
        assert layer.recompute_input_layernorm
        trainer.integration.remove()
        assert not layer.recompute_input_layernorm
        assert "forward" not in vars(trainer.chunks[0].decoder.layers[0])


def test_checkpoints_inside_of_layers_are_no_layers():
    # Megatron checkpoints its MLP, its attention and its shared experts with the function that it checkpoints layers with.
    modules = "core_attn mlp shared_experts"
    with make_trainer(f"{NORMED} {SELECTIVE} {modules}", make_config("attn_norm", "mlp_norm", "expert_fc1")) as trainer:
        trainer.run_step()
        sites = trainer.integration.list_sites()
    assert {site.layer for site in sites} == {0, 1}
    assert len(sites) == 5
