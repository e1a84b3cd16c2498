"""Tests ranks built from a model and its parallelism, and planning with one call."""

import dataclasses

import pytest

from fgoffload.errors import ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner import Assumptions, ExpertsShape, ModelShape, Parallelism, build_ranks, get_hardware, plan
from fgoffload.planner.memory.static_memory import ParameterState
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.units import GIB

MODEL = ModelShape(
    name="six layers of 16 experts",
    num_layers=6,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
    seq_length=4096,
    experts=ExpertsShape(num_experts=16, topk=4, ffn_hidden_size=2048),
)
ONE = Parallelism(micro_batch_size=2, microbatches=4)
H200 = get_hardware("h200")


@pytest.mark.parametrize(("hardware", "named"), [("h100", "'h100'"), (None, "None")])
def test_a_device_name_in_place_of_hardware_is_rejected_with_a_fix(hardware, named):
    with pytest.raises(ConfigError, match=rf'hardware {named} is not a Hardware\. Use get_hardware\("h100"\)'):
        plan(MODEL, ONE, hardware, budget_bytes=60 * GIB)


def test_a_plan_fits_the_budget_and_beats_full_recompute():
    minimal = Assumptions(state=ParameterState(gradient_bytes=2, main_parameter_bytes=0, moment_bytes=0), reserve_bytes=0)
    ranks = build_ranks(MODEL, ONE, H200, assumptions=minimal)
    baseline = simulate(ranks, OffloadPlan(actions={}))
    budget_bytes = baseline.peak_bytes - 3 * GIB
    report = plan(MODEL, ONE, H200, budget_bytes=budget_bytes, assumptions=minimal)
    assert report.baselines["baseline"] == baseline
    assert report.solution.result.peak_bytes <= budget_bytes
    assert baseline.step_s < report.solution.result.step_s < report.baselines["full recompute"].step_s
    assert simulate(ranks, report.solution.plan) == report.solution.result


def test_unknown_rates_cause_one_warning_and_measured_rates_none(caplog):
    ranks = Parallelism(expert_parallel_size=16, data_parallel_size=16)
    build_ranks(MODEL, ranks, get_hardware("mi300x"))
    assert [record.message for record in caplog.records] == [
        "hardware 'MI300X' has no measured link to the host (assuming a fraction of the vendor's rate) and no "
        "network_bytes_per_s (assuming 50 GB/s). To set rates, use a hardware file: docs/reference/hardware.md."
    ]
    caplog.clear()
    measured = dataclasses.replace(get_hardware("mi300x"), link=get_hardware("h100").link, network_bytes_per_s=20e9)
    build_ranks(MODEL, ranks, measured)
    assert caplog.records == []
