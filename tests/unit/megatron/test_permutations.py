"""Tokens that are permuted again: the first linear of the experts keeps nothing, and bits stay."""

import contextlib
from unittest import mock

import pytest
import torch
from support.grouped_experts import GroupedLinear, grouped_experts
from support.trainings import HIDDEN_BYTES, MOE, make_config, make_trainer, write_plan

from fgoffload import Action, OffloadConfig
from fgoffload.engine import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron import measured_layers, permutations, training
from fgoffload.integrations.megatron.permutations import _Permutation
from fgoffload.integrations.megatron.recompute import find_units
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


def test_it_is_permuted_once_more_for_all_experts_together_and_twice_where_backward_comes_twice(tmp_path, monkeypatch):
    with make_grouped_trainer({(0, "dispatch"): R}, tmp_path) as trainer:
        trainer.run_step()
        selected = []
        select = torch.Tensor.index_select

        def count(tensor, dim, index):
            selected.append(index.numel())
            return select(tensor, dim, index)

        monkeypatch.setattr(torch.Tensor, "index_select", count)
        trainer.run_step()
    tokens = HIDDEN_BYTES // 4 // 32
    # Two layers forward in each of two microbatches, and one of them in backward.
    assert selected.count(TOP_K * tokens) == 2 * 3


def test_the_first_linear_of_such_a_layer_saves_its_input_as_one_tensor(tmp_path):
    with make_grouped_trainer({(0, "dispatch"): R}, tmp_path) as trainer:
        trainer.run_step()
        linears = [layer.mlp.experts.linear_fc1 for layer in trainer.chunks[0].decoder.layers]
        assert [linear.save_original_input for linear in linears] == [True, False]
    assert [linear.save_original_input for linear in linears] == [False, False]


def test_below_hooks_of_others_it_permutes_once(tmp_path, monkeypatch):
    selected = []
    select = torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *args: selected.append(args[2].numel()) or select(*args))
    monkeypatch.setattr(permutations, "is_inert", lambda: True)
    with make_grouped_trainer({(0, "dispatch"): R}, tmp_path) as trainer:
        trainer.run_step()
    assert selected.count(TOP_K * HIDDEN_BYTES // 4 // 32) == 2 * 2


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


@pytest.mark.parametrize(
    ("flags", "has_unit"),
    [
        (GROUPED, True),
        (GROUPED.replace("alltoall", "allgather"), False),
        (f"{GROUPED} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", False),
    ],
)
def test_which_layers_can_permute_again(flags, has_unit):
    with stand_ins(), make_trainer(flags, None) as trainer:
        units = [find_units(layer) for layer in trainer.chunks[0].decoder.layers]
    assert [("dispatch" in one) for one in units] == [has_unit] * 2


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


def test_a_profile_offers_none_where_nobody_saves_what_it_would_run_again_from(monkeypatch):
    list_tags = measured_layers._LayerBuilder._name_tensors

    def leave_out_router(builder, run):
        return {key: name for key, name in list_tags(builder, run).items() if key != run.input_keys["router"]}

    monkeypatch.setattr(measured_layers._LayerBuilder, "_name_tensors", leave_out_router)
    assert measure_layer(GROUPED).find_unit("dispatch") is None


def test_experts_one_after_the_other_keep_their_tokens():
    with make_trainer(f"{MOE} --moe-token-dispatcher-type alltoall", None) as trainer:
        assert "dispatch" not in find_units(trainer.chunks[0].decoder.layers[0])


def test_what_runs_again_is_there_until_all_parts_have_theirs_and_made_anew_for_another_backward():
    runs = []

    def permute(tokens):
        runs.append(tokens.shape)
        return tokens.flip(0)

    hidden = torch.arange(12.0).reshape(2, 2, 3).clone().requires_grad_()
    permutation = _Permutation(hidden, permute, Place(None, "a test"))
    made = hidden.detach().reshape(4, 3).flip(0)
    parts = [permutation.pack(one) for one in (made[:1], made[1:], made[4:])]
    for count in (1, 2):
        again = [part.take() for part in parts]
        assert not any(one.requires_grad for one in again)
        assert [one.tolist() for one in again] == [made[:1].tolist(), made[1:].tolist(), []]
        assert runs == [(4, 3)] * count
        assert permutation._again is None


@pytest.mark.parametrize(("field", "value"), [("fp8", "e4m3"), ("fp4", "e2m1"), ("moe_latent_size", 16)])
def test_quantized_and_projected_tokens_are_kept(monkeypatch, field, value):
    with stand_ins(), make_trainer(GROUPED, None) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        assert permutations.can_permute_again(layer)
        monkeypatch.setattr(layer.config, field, value, raising=False)
        assert not permutations.can_permute_again(layer)


def test_tokens_of_other_ranks_are_not_sent_again(monkeypatch):
    with stand_ins(), make_trainer(GROUPED, None) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        assert type(layer.mlp.experts.linear_fc1) is GroupedLinear
        for name in ("ep_size", "tp_size"):
            with monkeypatch.context() as patch:
                patch.setattr(layer.mlp.token_dispatcher, name, 2)
                assert "dispatch" not in find_units(layer)
        assert "dispatch" in find_units(layer)
