"""Tokens that are permuted again: the first linear of the experts keeps nothing, and bits stay."""

import contextlib
from unittest import mock

import pytest
import torch
from support.grouped_experts import GroupedLinear, grouped_experts
from support.ticking import TickingCpuDevice
from support.trainings import HIDDEN_BYTES, MOE, make_config, make_trainer, write_plan

from fgoffload import Action, OffloadConfig
from fgoffload.engine import ActivationLedger, region
from fgoffload.engine.place import Place
from fgoffload.errors import StateError
from fgoffload.integrations.megatron import measured_layers, permutations, training
from fgoffload.integrations.megatron.handing_on import OpenReruns
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.permutations import _Permutation, _Runs
from fgoffload.integrations.megatron.recompute import find_units
from fgoffload.integrations.megatron.token_gathers import TokenGathers
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


def test_what_it_runs_again_from_leaves_where_the_router_does(tmp_path):
    with make_grouped_trainer({(0, "dispatch"): R, (0, "router"): O, (1, "router"): O}, tmp_path) as trainer:
        trainer.run_step()
        model = trainer.chunks[0]
        given, gone = [], []
        for layer in model.decoder.layers:
            layer.mlp.router.register_forward_pre_hook(
                lambda _, args: given.append(torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage()))
            )
        model.output_layer.register_forward_pre_hook(lambda *_: gone.append([one.expired() for one in given[-2:]]))
        trainer.run_step()
    assert gone == [[True, True]] * 2


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
    assert unit.held == unit.drops


@pytest.mark.parametrize("gather_s", [1e-9, 1e9])
def test_a_profile_says_that_it_takes_what_a_gather_does_where_the_host_is_late_and_else_its_part_of_the_stretch(
    gather_s, monkeypatch
):
    measured = []
    monkeypatch.setattr(TokenGathers, "measure_seconds", lambda _, *sizes: measured.append(sizes) or gather_s)
    layer = measure_layer(GROUPED)
    unit = layer.find_unit("dispatch")
    (stretch,) = (segment for segment in layer.segments if segment.name == "after router")
    assert set(measured) == {(HIDDEN_BYTES, TOP_K * HIDDEN_BYTES)}
    # Of seven parts that go through memory there, the sort by expert has four: it reads the two of each token and writes them.
    expected_s = 1.2 * gather_s if gather_s < 1 else 3 / 7 * stretch.forward_s
    assert (unit.forward_part, unit.extra_s) == (0.0, pytest.approx(expected_s))


def test_a_gather_is_timed_once_for_each_size_and_draws_nothing_of_what_others_draw():
    class Device(TickingCpuDevice):
        events = 0

        def record_event(self, stream, *, is_timed=False):
            self.events += 1
            self.now_s += 8.0  # between two events, of eight gathers
            return self.now_s

    device, before = Device(), torch.get_rng_state()
    gathers = TokenGathers(device)
    assert [gathers.measure_seconds(10_000, 30_000), gathers.measure_seconds(10_000, 30_000)] == [1.0, 1.0]
    assert device.events == 8
    assert gathers.measure_seconds(10_000, 20_000) == 1.0
    assert device.events == 16
    assert torch.equal(torch.get_rng_state(), before)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("moe_latent_size", 16),
        ("moe_input_jitter_eps", 0.1),
        ("moe_apply_probs_on_input", True),
    ],
)
def test_quantized_projected_and_multiplied_tokens_are_kept(monkeypatch, field, value):
    with stand_ins(), make_trainer(GROUPED, None) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        assert permutations.can_permute_again(layer)
        monkeypatch.setattr(layer.config, field, value, raising=False)
        assert not permutations.can_permute_again(layer)


def test_experts_that_leave_their_linears_to_an_op_fuser_keep_their_tokens(monkeypatch):
    with stand_ins(), make_trainer(GROUPED, None) as trainer:
        experts = trainer.chunks[0].decoder.layers[0].mlp.experts
        monkeypatch.setattr(type(experts), "_make_fused_impl", None, raising=False)
        assert "dispatch" not in find_units(trainer.chunks[0].decoder.layers[0])


def test_a_forward_of_the_first_linear_leaves_nothing_to_another_and_no_hooks_where_it_fails():
    def find_hooks(_, fails):
        hooks = region._find_top_hooks(False)  # noqa: FBT003 - not only while tracing
        if fails:
            raise ArithmeticError
        return hooks

    runs = _Runs(Place(None, "a test"), OpenReruns)
    permute, end = runs.wrap_permutation(lambda *_: None), runs.wrap_end(lambda _: (torch.ones(2, 3),))
    forward = runs.wrap_linear(find_hooks)
    for fails in (False, True):
        permute(mock.Mock(), torch.ones(2, 3))
        end(None)
        if fails:
            with pytest.raises(ArithmeticError):
                forward(None, fails)
        else:
            assert forward(None, fails) is not None
        assert forward(None, False) is None  # noqa: FBT003 - as the linear has it


def test_tokens_of_other_ranks_are_not_sent_again(monkeypatch):
    with stand_ins(), make_trainer(GROUPED, None) as trainer:
        layer = trainer.chunks[0].decoder.layers[0]
        assert type(layer.mlp.experts.linear_fc1) is GroupedLinear
        for name in ("ep_size", "tp_size"):
            with monkeypatch.context() as patch:
                patch.setattr(layer.mlp.token_dispatcher, name, 2)
                assert "dispatch" not in find_units(layer)
        assert "dispatch" in find_units(layer)
