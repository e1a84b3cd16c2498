"""Tokens that are permuted again: the first linear of the experts keeps nothing, and bits stay."""

import contextlib
from unittest import mock

import pytest
import torch
from support.grouped_experts import grouped_experts
from support.trainings import HIDDEN_BYTES, MOE, make_config, make_trainer, write_plan

from fgoffload import Action, OffloadConfig
from fgoffload.engine import ActivationLedger, region
from fgoffload.errors import StateError
from fgoffload.integrations.megatron import permutations, training
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.units import GIB

pytest.importorskip("megatron.core.transformer.moe.experts")

pytestmark = pytest.mark.usefixtures("parallel")

GROUPED = f"{MOE} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
R, B, O = Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD, Action.OFFLOAD  # noqa: E741 - as elsewhere
TOP_K = 2


@contextlib.contextmanager
def make_grouped_trainer(plan, tmp_path, flags=GROUPED):
    tags = sorted({tag for (_, tag), action in plan.items() if action.offloads})
    config = make_config(*tags, offload_plan=write_plan(tmp_path / "plan.json", plan)) if plan else None
    with stand_ins(), make_trainer(flags, config) as trainer:
        yield trainer


@contextlib.contextmanager
def stand_ins():
    """Give Megatron's local layers grouped experts, which they are refused with, until the body ends."""
    with grouped_experts(), mock.patch.object(training, "refuse_what_is_not_built"):
        yield


def run(plan, tmp_path, *, steps=2, flags=GROUPED):
    """Return losses and gradients of each step."""
    with make_grouped_trainer(plan, tmp_path, flags) as trainer:
        found = [trainer.run_step() for _ in range(steps)]
    return [(one.losses, one.gradient_digests) for one in found]


@pytest.mark.parametrize(
    "plan",
    [
        {(0, "dispatch"): R},
        {(0, "dispatch"): R, (1, "dispatch"): R},
        {(0, "dispatch"): R, (0, "mlp_norm"): R, (1, "dispatch"): R, (1, "mlp_norm"): B},
        {(0, "dispatch"): R, (0, "router"): O, (0, "moe_act"): R, (0, "expert_fc2"): Action.KEEP},
        {(0, "dispatch"): R, (0, "moe_act"): O, (0, "core_attn"): O, (1, "expert_fc1"): O},
        {(0, "dispatch"): R, (1, "moe"): R},
        {(0, "dispatch"): R, (1, "layer"): R},
        {(0, "dispatch"): R, (1, "expert_fc1"): R},
    ],
    ids=str,
)
def test_bits_stay(plan, tmp_path):
    assert run(plan, tmp_path) == run({}, tmp_path)


def list_first_inputs(trainer):
    """Let each first linear of the experts note the storage of what it is given, by weak reference; return the notes."""
    found = []

    def note(module, args):
        found.append((module, torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage())))

    for layer in trainer.chunks[0].decoder.layers:
        layer.mlp.experts.linear_fc1.register_forward_pre_hook(note)
    return found


def test_the_first_linears_input_is_gone_behind_it_in_the_layers_of_the_plan_alone(tmp_path):
    with make_grouped_trainer({(0, "dispatch"): R}, tmp_path) as trainer:
        trainer.run_step()
        model = trainer.chunks[0]
        given, gone = list_first_inputs(trainer), []
        model.output_layer.register_forward_pre_hook(lambda *_: gone.append([one.expired() for _, one in given[-2:]]))
        trainer.run_step()
    assert gone == [[True, False]] * 2


@pytest.mark.parametrize("part", ["experts", "experts.linear_fc1"])
@pytest.mark.parametrize("plan", [{(0, "dispatch"): R}, {(0, "dispatch"): R, (0, "moe_act"): O}], ids=str)
def test_tokens_that_a_hook_changes_in_place_are_saved_as_they_are(plan, part, tmp_path):
    def change(_, args):
        args[0].mul_(1.5)

    def train(plan):
        with make_grouped_trainer(plan, tmp_path) as trainer:
            for layer in trainer.chunks[0].decoder.layers:
                layer.mlp.get_submodule(part).register_forward_pre_hook(change)
            result = trainer.run_step()
        return result.losses, result.gradient_digests

    assert train(plan) == train({})


def train_apart(plan, tmp_path, train):
    """Return the gradients of the first MoE layer and of its inputs, after `train` had three of them."""
    with make_grouped_trainer(plan, tmp_path) as trainer:
        trainer.run_step()
        mlp = trainer.chunks[0].decoder.layers[0].mlp
        for weight in mlp.parameters():
            weight.main_grad.zero_()
        generator = torch.Generator().manual_seed(5)
        inputs = [torch.randn(32, 2, 32, generator=generator).requires_grad_() for _ in range(3)]
        train(mlp, lambda number: mlp(inputs[number] * 1.0)[0].square().sum())
        used = [one for one in inputs if one.grad is not None]
        assert len(used) >= 1
        return [one.clone() for one in (*(weight.main_grad for weight in mlp.parameters()), *(one.grad for one in used))]


def go_back_in_order(_, run):
    losses = [run(number) for number in range(3)]
    for loss in losses:
        loss.backward()


def go_back_in_reverse(_, run):
    losses = [run(number) for number in range(3)]
    for loss in reversed(losses):
        loss.backward()


def go_on_behind_errors(mlp, run):
    """Have forward fail before and behind the first linear, and run once more without a graph."""

    def fail(*_):
        raise ArithmeticError

    experts = mlp.experts
    for register in (
        experts.register_forward_pre_hook,
        experts.linear_fc1.register_forward_pre_hook,
        experts.linear_fc1.register_forward_hook,
        experts.linear_fc2.register_forward_pre_hook,
    ):
        handle = register(fail)
        with pytest.raises(ArithmeticError):
            run(0)
        handle.remove()
    with torch.no_grad():
        run(2)
    run(1).backward()
    assert region._find_top_hooks(False) is None  # noqa: FBT003 - not only while tracing


@pytest.mark.parametrize("train", [go_back_in_order, go_back_in_reverse, go_on_behind_errors])
def test_forwards_in_flight_and_forwards_that_fail_do_not_mix(train, tmp_path):
    found, expected = (train_apart(plan, tmp_path, train) for plan in ({(0, "dispatch"): R}, {}))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_what_it_runs_again_from_is_not_to_be_changed_in_place(tmp_path):
    def change(mlp, _):
        hidden = torch.ones(32, 2, 32).requires_grad_() * 1.0
        output = mlp(hidden)[0]
        hidden.mul_(2.0)
        output.sum().backward()

    with pytest.raises((StateError, RuntimeError), match=r"in.?place"):
        train_apart({(0, "dispatch"): R}, tmp_path, change)


def test_fused_permutation_runs_again_with_the_map_of_its_forward(monkeypatch):
    calls = []

    def permute(tokens, routing_map, *, num_out_tokens, fused):
        calls.append((routing_map, num_out_tokens, fused))
        return tokens + 1, "probabilities", "mapping"

    module = load_module("megatron.core.transformer.moe.token_dispatcher")
    monkeypatch.setattr(module, "permute", permute)
    config = mock.Mock(moe_permute_fusion=True)
    dispatcher = mock.Mock(config=config, routing_map="the map of forward", num_out_tokens=7)
    again = permutations._find_permutation(dispatcher)
    dispatcher.routing_map, dispatcher.num_out_tokens = "that of another", 8
    assert again(torch.zeros(2)).tolist() == [1, 1]
    assert calls == [("the map of forward", 7, True)]


def count_peak(plan, tmp_path):
    """Return the most bytes that activations take in a step."""
    with make_grouped_trainer(plan, tmp_path) as trainer:
        trainer.run_step()
        ledger = ActivationLedger(parameters=trainer.chunks[0].parameters())
        with trainer.observe(ledger):
            trainer.run_step()
        return ledger.peak_bytes


def test_the_peak_is_lower_by_what_the_first_linear_would_keep(tmp_path):
    # The activation leaves, so that hooks of the engine are around both times.
    peaks = [count_peak({(0, "moe_act"): O, **plan}, tmp_path) for plan in ({}, {(0, "dispatch"): R})]
    assert peaks[0] - peaks[1] == TOP_K * HIDDEN_BYTES


def test_weights_of_a_layer_behind_frozen_ones_get_their_gradients(tmp_path):
    def train_frozen(plan):
        with make_grouped_trainer(plan, tmp_path) as trainer:
            model = trainer.chunks[0]
            model.embedding.requires_grad_(requires_grad=False)
            for name, weight in model.decoder.layers[0].named_parameters():
                weight.requires_grad_(requires_grad="experts" in name)
            result = trainer.run_step()
        return result.losses, result.gradient_digests

    assert train_frozen({(0, "dispatch"): R}) == train_frozen({})


def measure_layer(flags):
    """Return the model of the first layer, as a measured step has it."""
    with stand_ins(), make_trainer(flags, OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=GIB)) as trainer:
        trainer.run_step()
        return trainer.integration.measurement.take_profile().layers[0].model


def test_a_profile_offers_it_with_what_it_drops_and_what_runs_before_the_first_linear():
    layer = measure_layer(GROUPED)
    unit, tensors = layer.find_unit("dispatch"), {one.name: one for one in layer.tensors}
    assert [(tensors[name].tags, tensors[name].size_bytes) for name in unit.drops] == [(("expert_fc1",), TOP_K * HIDDEN_BYTES)]
    assert (unit.segments, unit.before, unit.keeps, unit.extra_bytes) == (("after router",), "expert_fc1", (), 0)
    assert unit.held == unit.drops
