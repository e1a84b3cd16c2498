"""A measured step: the bits of a step without, every stretch with its time, and bytes as the engine counts them."""

import time

import pytest
import torch
from support.trainings import HIDDEN_BYTES, MIXED, MOE, make_config, make_trainer, train

from fgoffload import OffloadConfig
from fgoffload.engine import CpuDevice
from fgoffload.integrations.link import measure_link
from fgoffload.integrations.megatron.measured_units import (
    UnitForm,
    WatchedUnit,
    count_edges,
    keeps_bits,
)
from fgoffload.integrations.megatron.profiling import StepMeasurement
from fgoffload.integrations.megatron.step_records import ModuleRecord
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.timing.profile import Profile, count_tag_bytes, make_rank_model, merge_alike

pytestmark = pytest.mark.usefixtures("parallel")

AUTO = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=2**50, min_offloaded_tensor_size=64)
NORMED = MIXED.replace("--normalization RMSNorm", "")


def start_measurement(trainer):
    integration = trainer.integration
    integration.measurement = StepMeasurement(CpuDevice(), min_offloaded_numel=64, use_plan=integration.use_plan)
    return integration.measurement


def measure(flags, *, steps=2, measured=1):
    """Return the bits of all steps, and the profile of the step number `measured`."""
    bits = []
    with make_trainer(flags, AUTO) as trainer:
        measurement = start_measurement(trainer)
        for step in range(steps):
            if step == measured:
                measurement.request()
            result = trainer.run_step()
            bits.append((result.losses, result.gradient_digests))
            if step == measured:
                profile = measurement.take_profile()
        measurement.close()
    return bits, profile


@pytest.fixture(scope="module")
def mixed(parallel):
    return measure(MIXED, steps=3)


@pytest.fixture(scope="module")
def normed(parallel):
    return measure(NORMED)


def get_layer(profile, number):
    return next(layer.model for layer in profile.layers if layer.number == number)


def test_measuring_a_step_changes_no_bit_of_it_and_none_of_those_after(mixed):
    assert mixed[0] == train(MIXED, steps=3)[0]


def test_every_site_is_a_stretch_in_the_order_of_forward(mixed):
    _, profile = mixed
    attention = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    experts = ["shared_expert", "router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"]
    tagged = [
        [segment.name for segment in get_layer(profile, number).segments if not segment.name.startswith(("after", "start"))]
        for number in range(2)
    ]
    assert tagged == [[*attention, "mlp_fc1", "mlp_act", "mlp_fc2"], [*attention, *experts]]


def test_every_site_takes_time_forward_and_backward(mixed):
    _, profile = mixed
    for number in range(2):
        for segment in get_layer(profile, number).segments:
            assert segment.forward_s > 0
            if not segment.name.startswith(("after", "start")):
                assert segment.backward_s > 0, segment.name


def test_stretches_do_not_overlap_and_cover_most_of_the_step():
    # One microbatch, so that no median stands for another: all stretches together take no longer than the schedule.
    _, profile = measure(MIXED.replace("--global-batch-size 4", "--global-batch-size 2"))
    outer = [segment for chunk in profile.chunks for segment in (*chunk.first, *chunk.last)]
    layers = [segment for layer in profile.layers for segment in layer.model.segments]
    seconds = sum(segment.forward_s + segment.backward_s for segment in (*outer, *layers))
    schedule_s = profile.step_s - profile.step_end_s
    assert 0.5 * schedule_s < seconds <= schedule_s


def test_what_takes_longer_is_measured_to_take_longer(monkeypatch):
    # The router sleeps, forward alone.
    from megatron.core.transformer.moe.router import TopKRouter

    route = TopKRouter.forward

    def forward(self, *args, **kwargs):
        time.sleep(0.02)
        return route(self, *args, **kwargs)

    monkeypatch.setattr(TopKRouter, "forward", forward)
    _, profile = measure(MOE)
    for number in range(2):
        segments = {segment.name: segment for segment in get_layer(profile, number).segments}
        assert segments["router"].forward_s >= 0.02
        assert all(segment.forward_s < 0.02 for name, segment in segments.items() if name != "router")
        assert segments["router"].backward_s < 0.02


def test_bytes_are_those_of_the_tensors_that_each_module_keeps(mixed):
    _, profile = mixed
    dense = {tensor.name: tensor.size_bytes for tensor in get_layer(profile, 0).tensors}
    assert dense["layer input"] == HIDDEN_BYTES
    assert dense["qkv_linear 1"] == HIDDEN_BYTES  # the norm's output
    # Swiglu of 4 x hidden: the first linear's output is twice as wide, what the second one takes is not.
    assert dense["mlp_act 1"] == 8 * HIDDEN_BYTES
    assert dense["mlp_fc2 1"] == 4 * HIDDEN_BYTES
    moe = count_tag_bytes(get_layer(profile, 1))
    assert moe["expert_fc1"] == 2 * HIDDEN_BYTES  # two experts a token


@pytest.mark.parametrize("tag", ["attn_norm", "qkv_linear", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc1"])
def test_bytes_of_a_tag_are_those_that_the_engine_moves(tag, mixed):
    _, moved = train(MIXED, make_config(tag, min_offloaded_tensor_size=0), steps=2)
    counted = sum(count_tag_bytes(layer.model).get(tag, 0) for layer in mixed[1].layers)
    assert moved[tag] == 2 * counted  # microbatches


def test_what_the_loss_saves_is_there_with_the_loss_alone(mixed):
    # Not from the first layer's forward to the last one's backward: logits are as large as several layers.
    (chunk,) = mixed[1].chunks
    logits_bytes = 32 * 2 * 256 * 4  # [s, b, vocabulary] in fp32
    (last,) = chunk.last
    assert last.forward_extra_bytes == last.backward_extra_bytes >= logits_bytes
    assert chunk.saved_bytes < logits_bytes


def test_parameters_and_their_gradients_are_static_and_not_saved():
    # One microbatch: with several, what each of them saves is a table or a buffer, whatever else it is.
    _, profile = measure(MIXED.replace("--global-batch-size 4", "--global-batch-size 2"))
    with make_trainer(MIXED, None) as trainer:
        layers = trainer.chunks[0].decoder.layers
        parameter_bytes = sum(parameter.numel() * 4 for layer in layers for parameter in layer.parameters())
    assert profile.static_bytes >= 2 * parameter_bytes
    assert profile.chunks[0].saved_bytes < parameter_bytes  # by the loss, mostly, and as much again if weights counted
    # The first linear of the dense layer saves its input, and its weight is as large as nothing that it saves.
    linear = [tensor for tensor in get_layer(profile, 0).tensors if "mlp_fc1" in tensor.tags]
    assert [tensor.size_bytes for tensor in linear] == [HIDDEN_BYTES]


def test_the_host_waits_for_the_tokens_of_each_expert(mixed):
    waits = {segment.name: segment.host_wait for layer in mixed[1].layers for segment in layer.model.segments}
    assert {name for name, wait in waits.items() if wait} == {"expert_fc1"}
    assert waits["expert_fc1"] is HostWait.HOLD


def list_units(profile, number):
    return {unit.name: unit for unit in get_layer(profile, number).units}


@pytest.mark.parametrize(
    ("sums_gradients", "has_shared_input", "input_edges", "is_kept"),
    [(False, True, 2, True), (True, True, 2, False), (True, True, 1, True), (True, False, 2, True)],
)
def test_a_recompute_that_sums_gradients_is_offered_where_the_sum_is_the_same(
    sums_gradients, has_shared_input, input_edges, is_kept
):
    unit = WatchedUnit("unit", torch.nn.Identity(), UnitForm.REFILL, has_shared_input, sums_gradients)
    assert keeps_bits(unit, ModuleRecord(input_edges=input_edges)) is is_kept


def test_a_unit_drops_what_it_saves_inside_and_keeps_its_input(normed):
    _, profile = normed
    dense, moe = ({name: set(unit.drops) for name, unit in list_units(profile, number).items()} for number in range(2))
    tensors = {tensor.name: tensor for tensor in get_layer(profile, 0).tensors}
    assert "layer input" not in dense["layer"]
    assert dense["layer"] == tensors.keys() - {"layer input"}
    assert {"mlp_act 1", "mlp_fc2 1"} == dense["mlp"]  # its input is the norm's output, and stays
    assert "mlp_fc1 1" in dense["mlp_norm"]  # the norm's output goes, and what the norm saved
    assert "mlp_norm 1" not in dense["mlp_norm"]  # the norm's input stays
    # Softmax, mask and their like go; query, key and value stay.
    attention = [tensors[name].size_bytes for name in dense["core_attn"]]
    assert sum(attention) < sum(tensor.size_bytes for tensor in tensors.values() if "core_attn" in tensor.tags)
    assert max(attention) == 2 * 4 * 32 * 32 * 4  # [b, n, s, s] in fp32
    assert {"expert_fc1 1", "moe_combine 1", "shared_expert 2"} <= moe["moe"]
    assert "shared_expert 1" not in moe["moe"]


@pytest.mark.parametrize(("groups", "kept_bytes"), [(4, 0), (2, 2 * HIDDEN_BYTES + HIDDEN_BYTES // 2)])
def test_attention_with_groups_keeps_what_the_projections_return_where_it_runs_again(groups, kept_bytes):
    # Megatron's local attention saves the value as it is, a view of what the linear returned. With groups it saves a key and a
    # value for each head, and a checkpoint keeps what the linear returned, 4 + 2 + 2 heads of 4, and the key's two.
    _, profile = measure(f"{NORMED} --group-query-attention --num-query-groups {groups}")
    for number in range(2):
        kept = list_units(profile, number)["core_attn"].keeps
        assert sum(one.size_bytes for one in kept) == kept_bytes


def test_first_linears_are_offered_with_what_they_hand_on():
    _, profile = measure(f"{NORMED} --no-bias-swiglu-fusion")
    dense = list_units(profile, 0)
    layer = get_layer(profile, 0)
    sizes = {one.name: one.size_bytes for one in layer.tensors}
    # Query and key, and what the projection returned, of which the value is a view. The norm's output is what it is given.
    dropped_bytes = sum(sizes[name] for name in dense["qkv_linear"].drops)
    assert (1 + 1 + 3) * HIDDEN_BYTES <= dropped_bytes < (1 + 1 + 3 + 1) * HIDDEN_BYTES
    assert dense["qkv_linear"].extra_bytes == dense["mlp_fc1"].extra_bytes == 0
    assert (dense["qkv_linear"].segments[0], dense["qkv_linear"].before) == ("qkv_linear", "core_attn")
    names = [segment.name for segment in layer.segments]
    inside = names[names.index("mlp_fc1") : names.index("mlp_fc2")]
    assert (list(dense["mlp_fc1"].segments), dense["mlp_fc1"].before) == (inside, "mlp_fc2")


def test_edges_into_an_input_are_counted_through_the_graph_of_a_module():
    x = torch.ones(3, requires_grad=True) * 2
    assert count_edges([x.exp()], [x]) == 1
    assert count_edges([x * x.sum()], [x]) == 2
    assert count_edges([torch.ones(3)], [x]) == 0
    y = torch.ones(3, requires_grad=True) * 3
    assert count_edges([(x + y).exp() * y], [x, y]) == 2
    leaf = torch.ones(3, requires_grad=True)
    assert count_edges([leaf.exp() + leaf], [leaf]) == 2


def test_layers_that_are_alike_are_one_kind_to_the_simulator(normed):
    _, profile = measure(MOE)
    kinds = merge_alike([layer.model for layer in profile.layers], tolerance=100.0)
    assert len({id(model) for model in kinds.values()}) <= 2  # experts without tokens make a layer of another structure
    whole = Profile(
        device="CPU", versions={}, date="2026-11-22", link=measure_link(CpuDevice(), sizes=(1024,)), ranks=(profile,)
    )
    assert len(make_rank_model(whole, rank=0).passes) == 4
    assert Profile.from_json(whole.to_json(), source="text") == whole


def test_a_step_that_raised_is_recorded_anew():
    with make_trainer(MOE, AUTO) as trainer:
        measurement = start_measurement(trainer)
        measurement.request()
        mlp = trainer.chunks[0].decoder.layers[1].mlp

        def fail(*args):
            time.sleep(2)  # much longer than a step
            raise RuntimeError("no forward")

        hook = mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no forward"):
            trainer.run_step()
        hook.remove()
        trainer.run_step()
        profile = measurement.take_profile()
    assert [layer.number for layer in profile.layers] == [0, 1]
    assert profile.step_s < 2


def test_the_hooks_are_gone_when_a_measurement_is_closed():
    with make_trainer(MOE, AUTO) as trainer:
        measurement = start_measurement(trainer)
        trainer.run_step()
        attention = trainer.chunks[0].decoder.layers[0].self_attention.core_attention
        assert attention._forward_pre_hooks
        measurement.close()
        assert not attention._forward_pre_hooks


class SlowLink(CpuDevice):
    """Copies at 1 GB/s to the host and 2 GB/s back, each after 10 us, on a clock of its own."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def record_event(self, stream, *, is_timed=False):
        return self.now

    def copy_bytes(self, *, destination, source, stream):
        self.now += 10e-6 + source.numel() / (1e9 if stream is self.d2h_stream else 2e9)


def test_rates_and_latency_are_those_of_the_copies():
    link = measure_link(SlowLink(), sizes=(10_000, 100_000_000))
    small, large = link.copies
    assert small.d2h_bytes_per_s == pytest.approx(10_000 / 20e-6)
    assert small.h2d_bytes_per_s == pytest.approx(10_000 / 15e-6)
    assert small.duplex_bytes_per_s == pytest.approx(10_000 / 35e-6)
    assert large.d2h_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    model = link.to_model()
    assert model.copy_latency_s == pytest.approx(10e-6, rel=1e-3)
