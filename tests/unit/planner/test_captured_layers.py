"""Tests CUDA graphs in a plan: host launches, staging slots, and tags that a capture does not support."""

import dataclasses
import re
from pathlib import Path

import pytest

from fgoffload.cuda_graphs import FULL_ITERATION, LOCAL, NO_CAPTURE, TRANSFORMER_ENGINE, Graphs, find_captured, find_kept
from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.entry import plan_ranks
from fgoffload.planner.model.rank_layer import make_layer_shape
from fgoffload.planner.model_ranks import build_ranks
from fgoffload.planner.ranks.captured_layer import capture_rank
from fgoffload.planner.ranks.rank_model import HostPace
from fgoffload.planner.simulation.simulator import Detail, simulate
from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.op_times import GRAPH_LAUNCHES, list_layer_work, make_layer_model
from fgoffload.transfer_schedule import STAGING_SLOTS
from fgoffload.units import MIB

H100 = get_hardware("h100")
MIXED = (
    *("--num-layers", "4", "--hidden-size", "2048", "--ffn-hidden-size", "5632", "--num-attention-heads", "16"),
    *("--seq-length", "2048", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--bf16"),
    *("--disable-bias-linear", "--num-experts", "16", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "1408"),
    *("--moe-layer-freq", "[0,0,1,1]", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    *("--micro-batch-size", "2", "--global-batch-size", "32", "--vocab-size", "32000"),
)
DENSE, MOE = 0, 2
"""The number of one layer of each kind."""
WHOLE_BLOCK = Graphs(TRANSFORMER_ENGINE, ("attn", "moe_router", "moe_preprocess"))


def read(*flags):
    """Return the model, parallelism and assumptions that `flags` describe."""
    model, parallelism = read_model([*MIXED, *flags], source="x.sh")
    return model, parallelism, read_assumptions([*MIXED, *flags], source="x.sh", has_optimizer=False)


def build(graphs=NO_CAPTURE):
    model, parallelism, assumptions = read()
    return build_ranks(model, parallelism, H100, assumptions=dataclasses.replace(assumptions, graphs=graphs))


def get_layer(ranks, number):
    return next(layer.model for layer in ranks[0].chunks[0].layers if layer.number == number)


def count_launches(number, graphs):
    """Return the launches of a layer's forward and backward: at one second a launch, its time counts them."""
    model, parallelism, _ = read()
    shape = make_layer_shape(model, parallelism, number)
    layer = make_layer_model(shape, H100, kind="x", efficiency=Efficiency(host_s_per_launch=1.0), graphs=graphs)
    return round(layer.forward_s), round(layer.backward_s)


def count_kernels(number, *segments):
    model, parallelism, _ = read()
    works = [work for work in list_layer_work(make_layer_shape(model, parallelism, number)) if work.name in segments]
    return sum(work.forward.kernels for work in works), sum(work.backward.kernels for work in works)


ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
PERMUTATION = 10
"""Kernels of an unfused permutation."""


@pytest.mark.parametrize(
    ("number", "graphs", "segments", "others"),
    [
        (DENSE, Graphs(TRANSFORMER_ENGINE, ("attn",)), ATTENTION, 0),
        (MOE, Graphs(TRANSFORMER_ENGINE, ("attn",)), ATTENTION, 0),
        (DENSE, Graphs(TRANSFORMER_ENGINE, ("mlp",)), ("mlp_fc1", "mlp_act", "mlp_fc2"), 0),
        (MOE, Graphs(TRANSFORMER_ENGINE, ("moe_router",)), ("mlp_norm", "router"), 0),
        (MOE, WHOLE_BLOCK, (*ATTENTION, "mlp_norm", "router"), PERMUTATION),
    ],
)
def test_one_graph_launch_replaces_the_launches_of_its_kernels(number, graphs, segments, others):
    eager, captured = count_launches(number, NO_CAPTURE), count_launches(number, graphs)
    kernels = count_kernels(number, *segments)
    assert captured == tuple(all_ - own - others + GRAPH_LAUNCHES for all_, own in zip(eager, kernels, strict=True))


def test_a_whole_layer_graph_is_the_only_launch_of_its_layer():
    for number, graphs in ((MOE, Graphs(TRANSFORMER_ENGINE)), (DENSE, Graphs(LOCAL, ("attn",)))):
        assert count_launches(number, graphs) == (GRAPH_LAUNCHES, GRAPH_LAUNCHES)
    assert count_launches(DENSE, Graphs(TRANSFORMER_ENGINE, ("moe_router",))) == count_launches(DENSE, NO_CAPTURE)


def test_a_full_iteration_graph_is_never_launch_bound_and_has_no_host_waits():
    model, parallelism, assumptions = read("--pipeline-model-parallel-size", "2")
    launch_bound = dataclasses.replace(assumptions, efficiency=Efficiency(host_s_per_launch=1.0))
    never_launch_bound = dataclasses.replace(assumptions, efficiency=Efficiency(host_s_per_launch=0.0))
    graphs = dataclasses.replace(launch_bound, graphs=Graphs(FULL_ITERATION))
    eager, captured = (build_ranks(model, parallelism, H100, assumptions=one) for one in (never_launch_bound, graphs))
    baseline = OffloadPlan(actions={})
    assert simulate(captured, baseline).step_s == simulate(eager, baseline).step_s
    assert [rank.host_pace for rank in captured] == [HostPace.STEP_AHEAD] * 2
    assert {segment.host_wait for segment in captured[1].chunks[0].layers[0].model.segments} == {None}


def make_plan(*tags, action=Action.OFFLOAD):
    return OffloadPlan(actions={Site(chunk=0, layer=number, tag=tag): action for number in range(4) for tag in tags})


def test_offload_inside_a_graph_needs_two_slots_sized_for_the_largest_layer():
    ranks, plan = build(WHOLE_BLOCK), make_plan("core_attn", "attn_proj")
    # Query, key and value and the attention output: 2sb(3h) and 2sbh.
    slot_bytes = 2 * 2048 * 2 * (3 * 2048 + 2048)
    kept, captured = (simulate(ranks, one).ranks[0] for one in (OffloadPlan(actions={}), plan))
    assert captured.static_bytes == ranks[0].static_bytes + STAGING_SLOTS * slot_bytes
    # All four layers have freed their tensors when the loss begins, even those still being copied.
    assert kept.peak_at == captured.peak_at == "B0 output_layer"
    assert captured.peak_bytes == kept.peak_bytes - 4 * slot_bytes + STAGING_SLOTS * slot_bytes
    assert captured.end_bytes == captured.static_bytes
    assert captured.d2h_bytes == 16 * 4 * slot_bytes
    # The simulator reuses the results of repeated passes; a full timeline has the same peak.
    assert simulate(ranks, plan, detail=Detail.TIMELINE).ranks[0].peak_bytes == captured.peak_bytes


@pytest.mark.parametrize("graphs", [WHOLE_BLOCK, Graphs(FULL_ITERATION)])
def test_offload_outside_a_graph_or_in_a_full_iteration_graph_needs_no_slot(graphs):
    ranks = build(graphs)
    plan = OffloadPlan(actions={Site(chunk=0, layer=3, tag="expert_fc1"): Action.OFFLOAD})
    assert simulate(ranks, plan).ranks[0].static_bytes == ranks[0].static_bytes


@pytest.mark.parametrize(
    ("number", "modules", "tag", "stays"),
    [
        (DENSE, ("attn",), "qkv_linear", 1),  # the layer's input, and not the norm's output
        (DENSE, ("mlp",), "qkv_linear", 0),
        (DENSE, ("attn",), "mlp_fc1", 1),  # the residual
        (DENSE, ("attn", "mlp"), "mlp_fc1", 0),
        (MOE, ("moe_router",), "router", 1),  # the norm's output
        (MOE, ("moe_router", "moe_preprocess"), "router", 0),
    ],
)
def test_inputs_and_outputs_of_a_graph_stay_on_the_gpu(number, modules, tag, stays):
    plan = OffloadPlan(actions={Site(chunk=0, layer=number, tag=tag): Action.OFFLOAD})
    eager, captured = (simulate(build(graphs), plan) for graphs in (NO_CAPTURE, Graphs(TRANSFORMER_ENGINE, modules)))
    hidden_bytes, microbatches = 2 * 2048 * 2 * 2048, 16
    assert eager.ranks[0].d2h_bytes - captured.ranks[0].d2h_bytes == stays * hidden_bytes * microbatches


GRAPHS = [
    Graphs(TRANSFORMER_ENGINE, ("attn",)),
    WHOLE_BLOCK,
    Graphs(TRANSFORMER_ENGINE),
    Graphs(LOCAL, ("attn", "moe_router")),
    Graphs(FULL_ITERATION),
]


@pytest.mark.parametrize("graphs", [WHOLE_BLOCK, Graphs(LOCAL, ("attn", "moe_router")), Graphs(FULL_ITERATION)])
def test_plans_use_only_actions_that_a_capture_supports(graphs):
    eager, captured = (simulate(build(one), OffloadPlan(actions={})).peak_bytes for one in (NO_CAPTURE, graphs))
    assert eager == captured
    budget_bytes = captured - 200 * MIB
    report = plan_ranks(build(graphs), budget_bytes=budget_bytes)
    assert report.solution.result.peak_bytes <= budget_bytes
    for site, action in report.solution.plan.actions.items():
        is_moe = site.layer >= MOE
        if action.recomputes:
            assert site.tag not in find_captured(*graphs, is_moe=is_moe)
        if action.offloads:
            assert site.tag not in find_kept(*graphs, is_moe=is_moe)
    assert "full recompute" not in report.baselines
    # The nearest Megatron flags are ones that Megatron accepts, too.
    assert report.solution.nearest is None or "full" not in report.solution.nearest.flags.list_arguments()


@pytest.mark.parametrize("graphs", GRAPHS)
def test_actions_that_a_capture_does_not_support_are_rejected(graphs):
    ranks = build(graphs)
    for number, is_moe in ((DENSE, False), (MOE, True)):
        eager = get_layer(build(), number)
        refused = [(unit.name, Action.RECOMPUTE) for unit in eager.units if unit.name in find_captured(*graphs, is_moe=is_moe)]
        refused += [(tag, Action.OFFLOAD) for tag in eager.offloadable_tags & find_kept(*graphs, is_moe=is_moe).keys()]
        assert refused
        for tag, action in refused:
            with pytest.raises(PlanError, match=re.escape(f"The plan {action.value}s {tag!r}")):
                simulate(ranks, OffloadPlan(actions={Site(chunk=0, layer=number, tag=tag): action}))


def test_an_eager_profile_is_planned_under_the_limits_of_its_graphs():
    (table,) = build(WHOLE_BLOCK)
    (eager,) = build()
    captured = capture_rank(eager, WHOLE_BLOCK, has_shared_overlap=False)
    for own, other in zip(captured.chunks[0].layers, table.chunks[0].layers, strict=True):
        # One launch of a graph is cheaper, so recompute takes less time.
        units = [dataclasses.replace(unit, extra_s=0.0) for unit in own.model.units]
        assert units == [dataclasses.replace(unit, extra_s=0.0) for unit in other.model.units]
        assert own.model.offloadable_tags == other.model.offloadable_tags
    assert capture_rank(eager, NO_CAPTURE, has_shared_overlap=False) == eager
    assert eager.host_pace is HostPace.LAYER_AHEAD
    assert capture_rank(eager, Graphs(FULL_ITERATION), has_shared_overlap=False).host_pace is HostPace.STEP_AHEAD


def test_cuda_graph_flags_set_the_captured_modules():
    root = Path(__file__).parents[3]
    text = (root / "arguments" / "launch_bound_graphs.sh").read_text(encoding="utf-8")
    flags = re.findall(r"--cuda-graph-(?:impl|modules)[^\n]*", text)
    *_, assumptions = read(*" ".join(flags).split())
    assert assumptions.graphs == WHOLE_BLOCK
    assert read("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration")[2].graphs == Graphs(FULL_ITERATION)
    assert read("--cuda-graph-modules", "attn")[2].graphs.impl == NO_CAPTURE.impl
