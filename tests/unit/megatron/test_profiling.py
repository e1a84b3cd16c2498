"""Tests measured steps: bitwise identical results, a time for every segment, and the bytes that the engine offloads."""

import pytest
import torch
from support.trainings import MIXED, MOE, make_config, make_trainer, train

from fgoffload import OffloadConfig
from fgoffload.engine import CpuDevice
from fgoffload.integrations.link import measure_link
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.measured_units import WatchedUnit, count_edges, keeps_bits
from fgoffload.integrations.megatron.profile.step_measurement import StepMeasurement
from fgoffload.integrations.megatron.profile.step_records import ModuleRecord
from fgoffload.planner.ranks.layer_model import HostWait

pytestmark = pytest.mark.usefixtures("parallel")

AUTO = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=2**50, min_offloaded_tensor_size=64)
NORMED = MIXED.replace("--normalization RMSNorm", "")
ONE_MICROBATCH = MIXED.replace("--global-batch-size 4", "--global-batch-size 2")


def start_measurement(trainer):
    integration = trainer.integration
    integration.measurement = StepMeasurement(CpuDevice(), min_offloaded_numel=64, use_plan=integration.actions.use_plan)
    return integration.measurement


def measure(flags, *, steps=2):
    """Return the results of all steps, and the profile of the second."""
    results = []
    with make_trainer(flags, AUTO) as trainer:
        measurement = start_measurement(trainer)
        for step in range(steps):
            if step == 1:
                measurement.request()
            result = trainer.run_step()
            results.append((result.losses, result.gradient_digests))
            if step == 1:
                profile = measurement.take_profile()
        measurement.close()
    return results, profile


@pytest.fixture(scope="module")
def mixed(parallel):
    return measure(MIXED, steps=3)


@pytest.fixture(scope="module")
def normed(parallel):
    return measure(NORMED)[1]


@pytest.fixture(scope="module")
def one_microbatch(parallel):
    """Return the profile of a single microbatch, without medians over several."""
    return measure(ONE_MICROBATCH)[1]


def get_layer(profile, number):
    return next(layer.model for layer in profile.layers if layer.number == number)


def list_units(profile, number):
    return {unit.name: unit for unit in get_layer(profile, number).units}


def test_measured_and_later_steps_are_bitwise_identical(mixed):
    assert mixed[0] == train(MIXED, steps=3)[0]


def test_every_site_is_a_timed_segment_in_the_order_of_forward(mixed):
    _, profile = mixed
    attention = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    experts = ["shared_expert", "router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"]
    for number, names in ((0, [*attention, "mlp_fc1", "mlp_act", "mlp_fc2"]), (1, [*attention, *experts])):
        segments = get_layer(profile, number).segments
        tagged = [segment for segment in segments if not segment.name.startswith(("after", "start"))]
        assert [segment.name for segment in tagged] == names
        assert all(segment.forward_s > 0 for segment in segments)
        assert all(segment.backward_s > 0 for segment in tagged)


def test_a_segment_is_charged_only_for_its_own_ops(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(CpuDevice, "record_event", lambda device, stream, *, is_timed=False: now_s[0])
    router = load_module("megatron.core.transformer.moe.router").TopKRouter
    route = router.forward

    def route_slowly(self, *args, **kwargs):
        now_s[0] += 1.0
        return route(self, *args, **kwargs)

    monkeypatch.setattr(router, "forward", route_slowly)
    _, profile = measure(MOE)
    for layer in profile.layers:
        times = {segment.name: (segment.forward_s, segment.backward_s) for segment in layer.model.segments}
        assert times.pop("router") == (1.0, 0.0)
        assert set(times.values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("tag", ["attn_norm", "qkv_linear", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc1"])
def test_profiled_bytes_match_the_bytes_that_the_engine_offloads(tag, mixed):
    _, offloaded_bytes = train(MIXED, make_config(tag, min_offloaded_tensor_size=0), steps=1)
    counted = sum(one.size_bytes for layer in mixed[1].layers for one in layer.model.tensors if tag in one.tags)
    assert offloaded_bytes[tag] == 2 * counted  # microbatches


def test_parameters_and_gradients_count_as_static_not_saved_memory(one_microbatch):
    with make_trainer(MIXED, None) as trainer:
        layers = trainer.chunks[0].decoder.layers
        parameter_bytes = sum(parameter.numel() * 4 for layer in layers for parameter in layer.parameters())
    assert one_microbatch.static_bytes >= 2 * parameter_bytes
    assert one_microbatch.chunks[0].saved_bytes < parameter_bytes  # mostly saved by the loss; saved weights would exceed it


def test_profiles_record_the_host_wait_for_token_counts(mixed):
    waits = {segment.name: segment.host_wait for layer in mixed[1].layers for segment in layer.model.segments}
    assert {name: wait for name, wait in waits.items() if wait} == {"expert_fc1": HostWait.HOLD}


@pytest.mark.parametrize(("sums_shared_input", "input_edges", "is_kept"), [(False, 2, True), (True, 2, False), (True, 1, True)])
def test_recompute_is_offered_only_if_the_order_of_gradient_sums_is_kept(sums_shared_input, input_edges, is_kept):
    unit = WatchedUnit("unit", torch.nn.Identity(), True, sums_shared_input)  # noqa: FBT003
    assert keeps_bits(unit, ModuleRecord(input_edges=input_edges)) is is_kept


def test_edges_into_an_input_are_counted_across_the_autograd_graph():
    x = torch.ones(3, requires_grad=True) * 2
    assert [count_edges([y], [x]) for y in (torch.ones(3), x.exp(), x * x.sum())] == [0, 1, 2]


def test_a_recompute_unit_drops_inner_tensors_and_keeps_its_input(normed):
    dense, moe = ({name: set(unit.drops) for name, unit in list_units(normed, number).items()} for number in range(2))
    tensors = {tensor.name: tensor for tensor in get_layer(normed, 0).tensors}
    assert dense["layer"] == tensors.keys() - {"layer input"}
    assert {"mlp_act 1", "mlp_fc2 1"} == dense["mlp"]  # its input, the norm's output, is kept
    assert "mlp_fc1 1" in dense["mlp_norm"]  # the norm's output is dropped
    assert "mlp_norm 1" not in dense["mlp_norm"]  # the norm's input is kept
    # The softmax is dropped; query, key and value are kept.
    attention = [tensors[name].size_bytes for name in dense["core_attn"]]
    assert sum(attention) < sum(tensor.size_bytes for tensor in tensors.values() if "core_attn" in tensor.tags)
    assert max(attention) == 2 * 4 * 32 * 32 * 4  # [b, n, s, s] in fp32
    assert {"expert_fc1 1", "moe_combine 1", "shared_expert 2"} <= moe["moe"]
    assert "shared_expert 1" not in moe["moe"]


def test_a_step_that_raised_is_measured_from_scratch(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(CpuDevice, "record_event", lambda device, stream, *, is_timed=False: now_s[0])
    with make_trainer(MOE, AUTO) as trainer:
        measurement = start_measurement(trainer)
        measurement.request()
        mlp = trainer.chunks[0].decoder.layers[1].mlp

        def fail(*args):
            now_s[0] += 1000.0
            raise RuntimeError("no forward")

        hook = mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no forward"):
            trainer.run_step()
        hook.remove()
        trainer.run_step()
        profile = measurement.take_profile()
        measurement.close()
        attention = trainer.chunks[0].decoder.layers[0].self_attention.core_attention
        assert not attention._forward_pre_hooks
    assert [layer.number for layer in profile.layers] == [0, 1]
    assert profile.step_s < 1000.0


class SlowLink(CpuDevice):
    """Copies at 1 GB/s to the host and 2 GB/s to the device with 10 us latency, on a simulated clock."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def record_event(self, stream, *, is_timed=False):
        return self.now

    def copy_bytes(self, *, destination, source, stream):
        self.now += 10e-6 + source.numel() / (1e9 if stream is self.d2h_stream else 2e9)


def test_link_rates_and_latency_match_the_copies():
    link = measure_link(SlowLink(), sizes=(10_000, 100_000_000))
    small, large = link.copies
    assert small.d2h_bytes_per_s == pytest.approx(10_000 / 20e-6)
    assert small.h2d_bytes_per_s == pytest.approx(10_000 / 15e-6)
    assert small.duplex_bytes_per_s == pytest.approx(10_000 / 35e-6)
    assert large.d2h_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    model = link.to_model()
    assert model.copy_latency_s == pytest.approx(10e-6, rel=1e-3)
