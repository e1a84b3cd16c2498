"""How long the stretches of a layer take, against numbers worked out by hand.

Most tests have a device that is only limited by what they are about: it computes 1e12 operations a second and memory is
infinitely fast, or it moves 1e9 bytes a second and computes in no time.
"""

import dataclasses
import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_times import COMPUTING, DENSE, FAST, IDEAL, MLA, MOE, MOVING, change_experts, run

from fgoffload import ConfigError
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape
from fgoffload.planner.operations.ops import Execution, Limit, Work, make_moves
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.timing import op_times
from fgoffload.planner.timing.efficiency import ASSUMED_MEMORY, Efficiency, Network
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.op_times import Clock, make_layer_model, replace_times

DENSE_STRETCHES = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
MOE_STRETCHES = [
    *("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "router"),
    *("dispatch", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"),
]


def get_forward(segments):
    return {name: one.forward_s for name, one in segments.items()}


def test_the_example_in_the_module_holds():
    assert doctest.testmod(op_times).failed == 0


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (DENSE, DENSE_STRETCHES),
        (
            dataclasses.replace(DENSE, has_fused_norms=False),
            ["attn_norm", *DENSE_STRETCHES[:3], "mlp_norm", *DENSE_STRETCHES[3:]],
        ),
        (MLA, ["attn_norm", "qkv_down", *DENSE_STRETCHES]),
        (MOE, MOE_STRETCHES),
        (change_experts(shared_ffn_hidden_size=16), [*MOE_STRETCHES[:4], "shared_expert", *MOE_STRETCHES[4:]]),
        (dataclasses.replace(DENSE, has_mtp_projection=True), ["mtp_projection", *DENSE_STRETCHES, "mtp_norm"]),
    ],
)
def test_the_stretches_are_those_of_the_modules_that_the_layer_has_in_the_order_of_forward(shape, names):
    assert list(run(shape)) == names


def test_matrix_products_take_2mnk_operations_and_twice_that_in_backward():
    segments = run(DENSE)
    # 128 rows. Query, key and value have (4 + 2 + 2) x 8 channels.
    flop = {
        "qkv_linear": 2 * 128 * 32 * 64,
        "attn_proj": 2 * 128 * 32 * 32,
        "mlp_fc1": 2 * 128 * 32 * 96,
        "mlp_fc2": 2 * 128 * 48 * 32,
    }
    assert {name: segments[name].forward_s for name in flop} == pytest.approx({name: n / 1e12 for name, n in flop.items()})
    assert {name: segments[name].backward_s for name in flop} == pytest.approx({name: 2 * n / 1e12 for name, n in flop.items()})


def test_causal_attention_computes_half_of_all_pairs_and_two_and_a_half_times_that_in_backward():
    core = run(DENSE)["core_attn"]
    # Two products of 2 x 64 x 64 x 8 operations for 2 sequences and 4 heads, halved.
    assert core.forward_s == pytest.approx(2 * 2 * 64 * 64 * 8 * 2 * 4 / 2 / 1e12)
    assert core.backward_s == pytest.approx(2.5 * core.forward_s)


def test_heads_of_latent_attention_have_products_of_two_sizes():
    core = run(MLA)["core_attn"]
    pair_flop = 2 * 64 * 64 / 2 * 2 * 4
    assert core.forward_s == pytest.approx(pair_flop * (12 + 8) / 1e12)
    # Scores again, and the gradients of query and key over 12 channels; those of scores and values over 8.
    assert core.backward_s == pytest.approx(pair_flop * (3 * 12 + 2 * 8) / 1e12)


def test_latent_attention_compresses_and_widens():
    segments = run(MLA)
    # To 10 and to 6 + 4 channels; from 10 to 4 x 12, and from 6 to 4 x (8 + 8).
    assert segments["qkv_down"].forward_s == pytest.approx(2 * 128 * 32 * (10 + 10) / 1e12)
    assert segments["qkv_linear"].forward_s == pytest.approx(2 * 128 * (10 * 48 + 6 * 64) / 1e12)
    whole = dataclasses.replace(MLA, latent=dataclasses.replace(MLA.latent, q_lora_rank=None))
    # The query is then projected from the 32 channels in one go.
    assert run(whole)["qkv_down"].forward_s == pytest.approx(2 * 128 * 32 * 10 / 1e12)
    assert run(whole)["qkv_linear"].forward_s == pytest.approx(2 * 128 * (32 * 48 + 6 * 64) / 1e12)


@pytest.mark.parametrize(("window", "pairs"), [(None, 2048), (64, 2048), (100, 2048), (16, 64 * 16 - 128), (1, 63.5)])
def test_a_window_leaves_out_the_pairs_that_are_further_apart(window, pairs):
    core = run(DENSE, execution=Execution(window_tokens=window))["core_attn"]
    assert core.forward_s == pytest.approx(2 * pairs * (8 + 8) * 2 * 4 / 1e12)


def test_context_parallel_ranks_share_the_pairs_of_the_whole_sequence():
    core = run(DENSE, execution=Execution(context_parallel_size=4))["core_attn"]
    # 256 tokens have 256² / 2 pairs, of which a rank has a quarter.
    assert core.forward_s == pytest.approx(2 * (256 * 256 / 2 / 4) * (8 + 8) * 2 * 4 / 1e12)


def test_experts_compute_the_rows_that_they_get():
    segments = run(MOE)
    # 256 rows, to gate and up of 16 and back.
    assert segments["expert_fc1"].forward_s == pytest.approx(2 * 256 * 32 * 32 / 1e12)
    assert segments["expert_fc2"].forward_s == pytest.approx(2 * 256 * 16 * 32 / 1e12)
    spread = run(change_experts(expert_parallel_size=4))
    assert spread["expert_fc1"].forward_s == pytest.approx(segments["expert_fc1"].forward_s)
    uneven = run(change_experts(expert_parallel_size=4, imbalance=1.5))
    assert uneven["expert_fc1"].forward_s == pytest.approx(1.5 * segments["expert_fc1"].forward_s)
    shared = run(change_experts(shared_ffn_hidden_size=24))
    assert shared["shared_expert"].forward_s == pytest.approx(2 * 128 * (32 * 48 + 24 * 32) / 1e12)


def test_an_activation_without_a_gate_halves_the_first_linear():
    assert run(dataclasses.replace(DENSE, is_gated=False))["mlp_fc1"].forward_s == pytest.approx(2 * 128 * 32 * 48 / 1e12)


def test_experts_without_a_gate_halve_theirs():
    found = run(dataclasses.replace(MOE, is_gated=False))["expert_fc1"]
    assert found.forward_s == pytest.approx(2 * 256 * 32 * 16 / 1e12)


def test_an_unfused_activation_moves_what_each_of_its_operators_reads_and_writes():
    inner = 2 * 128 * 48
    fused, unfused = (run(dataclasses.replace(DENSE, has_fused_activation=one), MOVING)["mlp_act"] for one in (True, False))
    assert (fused.forward_s, fused.backward_s) == pytest.approx((3 * inner / 1e9, 5 * inner / 1e9))
    # silu, the sum and the product; gradients of the product, of silu, and both halves side by side.
    assert (unfused.forward_s, unfused.backward_s) == pytest.approx((7 * inner / 1e9, 13 * inner / 1e9))
    bare = dataclasses.replace(DENSE, is_gated=False)
    assert run(bare, MOVING) == run(dataclasses.replace(bare, has_fused_activation=False), MOVING)


@pytest.mark.parametrize(("dtype_bytes", "forward", "backward"), [(2, 7 + 2, 13 + 6), (4, 7 + 6, 13 + 17)])
def test_an_unfused_activation_of_experts_multiplies_by_the_probabilities_in_kernels_of_their_own(
    dtype_bytes, forward, backward
):
    shape = dataclasses.replace(change_experts(router=RouterShape(dtype_bytes=dtype_bytes)), has_fused_activation=False)
    found, inner = run(shape, MOVING)["moe_act"], 2 * 256 * 16
    assert (found.forward_s, found.backward_s) == pytest.approx((forward * inner / 1e9, backward * inner / 1e9))
    # Each takes a while to start.
    launched = run(shape, efficiency=dataclasses.replace(IDEAL, kernel_start_s=1.0))["moe_act"]
    kernels = {2: (4, 7), 4: (5, 9)}[dtype_bytes]
    assert (launched.forward_s, launched.backward_s) == pytest.approx(kernels)


def test_linears_in_fp8_run_at_its_rate_and_attention_does_not():
    plain, quantized = run(DENSE), run(dataclasses.replace(DENSE, fp8_recipe="tensorwise"))
    assert quantized["mlp_fc2"].forward_s == pytest.approx(plain["mlp_fc2"].forward_s / 4)
    assert quantized["core_attn"].forward_s == pytest.approx(plain["core_attn"].forward_s)


def test_linears_in_fp8_move_half_and_make_it_first():
    quantized = run(dataclasses.replace(DENSE, fp8_recipe="tensorwise"), MOVING)["mlp_fc2"]
    inputs, outputs, weights, residual = 128 * 48, 128 * 32, 48 * 32, 2 * 128 * 32
    # The input is read in bf16 and written twice in fp8; the product reads it and the weights, and writes bf16.
    forward = 4 * inputs + inputs + weights + 2 * outputs
    assert quantized.forward_s == pytest.approx((forward + 3 * residual) / 1e9)
    # So is the gradient of the output. One product writes the input's in bf16, the other adds to a sum in fp32.
    backward = 4 * outputs + (outputs + weights + 2 * inputs) + (outputs + inputs + 8 * weights)
    assert quantized.backward_s == pytest.approx((backward + 2 * residual) / 1e9)


def test_each_kind_of_kernel_reaches_its_own_share_of_the_peaks():
    # A power of two for each, so that no two can be mixed up.
    shares = {
        "matmul": 1 / 2,
        "grouped_matmul": 1 / 4,
        "attention_forward": 1 / 8,
        "attention_backward": 1 / 16,
        "memory": 1 / 32,
    }
    efficiency = dataclasses.replace(IDEAL, **shares)
    plain, found = run(MOE), run(MOE, efficiency=efficiency)
    assert found["attn_proj"].forward_s == pytest.approx(2 * plain["attn_proj"].forward_s)
    assert found["expert_fc1"].backward_s == pytest.approx(4 * plain["expert_fc1"].backward_s)
    assert found["core_attn"].forward_s == pytest.approx(8 * plain["core_attn"].forward_s)
    assert found["core_attn"].backward_s == pytest.approx(16 * plain["core_attn"].backward_s)
    plain, found = run(MOE, MOVING), run(MOE, MOVING, efficiency=efficiency)
    assert found["moe_act"].forward_s == pytest.approx(32 * plain["moe_act"].forward_s)


def test_kernels_that_hardly_compute_take_the_time_of_their_bytes():
    segments = run(change_experts(has_fused_permutation=True), MOVING)
    hidden, permuted, inner = 2 * 128 * 32, 2 * 256 * 32, 2 * 256 * 16
    # Read and written; in backward three, and three for the sum with the residual's gradient.
    assert (segments["mlp_norm"].forward_s, segments["mlp_norm"].backward_s) == pytest.approx(
        (2 * hidden / 1e9, 6 * hidden / 1e9)
    )
    # Gate and up read and one written; in backward a gradient too, and two written.
    assert segments["moe_act"].forward_s == pytest.approx(3 * inner / 1e9)
    assert segments["moe_act"].backward_s == pytest.approx(5 * inner / 1e9)
    # Spread, then sorted by expert, since the rank has all eight. Back: sorted, then added up.
    assert segments["dispatch"].forward_s == pytest.approx((hidden + permuted + 2 * permuted) / 1e9)
    assert segments["dispatch"].backward_s == pytest.approx((hidden + permuted + 2 * permuted) / 1e9)
    # And the residual: two read, one written.
    assert segments["moe_combine"].forward_s == pytest.approx((hidden + permuted + 2 * permuted + 3 * hidden) / 1e9)


def test_permutation_without_fusion_reads_each_token_for_each_expert_and_adds_one_by_one():
    segments = run(MOE, MOVING)
    hidden, permuted = 2 * 128 * 32, 2 * 256 * 32
    assert segments["dispatch"].forward_s == pytest.approx((2 * permuted + 2 * permuted) / 1e9)
    assert segments["dispatch"].backward_s == pytest.approx((2 * permuted + 3 * permuted + hidden) / 1e9)


def test_a_rank_with_one_expert_sorts_nothing():
    alone = change_experts(expert_parallel_size=8, has_fused_permutation=True)
    fast = Network(nvlink_bytes_per_s=FAST, network_bytes_per_s=FAST)
    found = run(alone, MOVING, network=fast)["dispatch"].forward_s
    assert found == pytest.approx((2 * 128 * 32 + 2 * 256 * 32) / 1e9)


def test_gradients_of_weights_are_added_in_the_matrix_product_or_by_a_kernel_of_their_own():
    fused, late = run(DENSE, MOVING), run(DENSE, MOVING, execution=Execution(has_fused_gradient_accumulation=False))
    rows, weights = 128 * (48 + 32), 48 * 32
    residual = 2 * 2 * 128 * 32
    # The gradient of the input reads a gradient and the weights and writes one; that of the weights reads both and a sum.
    inputs = 2 * (rows + weights)
    assert fused["mlp_fc2"].backward_s == pytest.approx((inputs + 2 * rows + 8 * weights + residual) / 1e9)
    assert late["mlp_fc2"].backward_s == pytest.approx((inputs + 2 * rows + 2 * weights + 10 * weights + residual) / 1e9)


@pytest.mark.parametrize(("is_fused", "times"), [(True, 2), (False, 9)])
def test_rotary_embeddings_read_and_write_query_and_key(is_fused, times):
    plain = run(DENSE, MOVING)["qkv_linear"].forward_s
    turned = run(dataclasses.replace(DENSE, rotary_channels=8, has_fused_rotary=is_fused), MOVING)["qkv_linear"].forward_s
    assert turned - plain == pytest.approx(times * 2 * 128 * (4 + 2) * 8 / 1e9)


def test_norms_of_heads_read_and_write_query_and_key():
    plain, normed = run(DENSE, MOVING)["qkv_linear"], run(dataclasses.replace(DENSE, has_qk_norm=True), MOVING)["qkv_linear"]
    turned = 2 * 128 * (4 + 2) * 8
    assert normed.forward_s - plain.forward_s == pytest.approx(2 * turned / 1e9)
    assert normed.backward_s - plain.backward_s == pytest.approx(3 * turned / 1e9)


def test_norms_of_compressed_tensors_read_and_write_them():
    normed = dataclasses.replace(MLA, latent=dataclasses.replace(MLA.latent, has_qk_norm=True))
    difference = run(normed, MOVING)["qkv_linear"].forward_s - run(MLA, MOVING)["qkv_linear"].forward_s
    assert difference == pytest.approx(2 * 2 * 128 * (10 + 6 + 4) / 1e9)


def test_the_router_projects_to_all_experts_and_works_on_their_tables():
    computing, moving = run(MOE)["router"], run(MOE, MOVING)["router"]
    assert (computing.forward_s, computing.backward_s) == pytest.approx((2 * 128 * 32 * 8 / 1e12, 4 * 128 * 32 * 8 / 1e12))
    hidden, tables = 2 * 128 * 32, 4 * 128 * 8
    assert moving.forward_s == pytest.approx((hidden + 6 * tables) / 1e9)
    # A copy in fp32 is written and read.
    copied = run(change_experts(router=RouterShape(dtype_bytes=4)), MOVING)["router"]
    assert copied.forward_s - moving.forward_s == pytest.approx(2 * 2 * hidden / 1e9)


def test_multi_token_prediction_projects_two_hidden_states_to_one():
    shape = dataclasses.replace(DENSE, has_mtp_projection=True)
    assert run(shape)["mtp_projection"].forward_s == pytest.approx(2 * 128 * 64 * 32 / 1e12)
    assert run(shape, MOVING)["mtp_norm"].forward_s == pytest.approx(2 * 2 * 128 * 32 / 1e9)
    assert run(dataclasses.replace(shape, tensor_parallel_size=2))["mtp_projection"].forward_s > 0


def test_the_residual_is_added_by_one_kernel_or_two():
    one, two = run(DENSE, MOVING), run(DENSE, MOVING, execution=Execution(has_fused_dropout_add=False))
    for name in ("attn_proj", "mlp_fc2"):
        assert two[name].forward_s - one[name].forward_s == pytest.approx(2 * 2 * 128 * 32 / 1e9)


def test_the_host_waits_before_tokens_leave_and_nowhere_else():
    fused, unfused = run(change_experts(has_fused_permutation=True)), run(MOE)
    assert {name: one.host_wait for name, one in fused.items() if one.host_wait} == {"dispatch": HostWait.KERNEL}
    assert {name: one.host_wait for name, one in unfused.items() if one.host_wait} == {"dispatch": HostWait.HOLD}
    assert not any(one.host_wait for one in run(DENSE).values())


def test_what_the_host_cannot_launch_in_time_takes_the_time_of_the_launches():
    idle = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(DENSE, idle, efficiency=dataclasses.replace(IDEAL, host_s_per_launch=1.0))
    # Norm and product, attention, product and residual, norm and product, activation, product and residual.
    assert get_forward(segments) == pytest.approx(dict(zip(DENSE_STRETCHES, (2, 1, 2, 2, 1, 2), strict=True)))
    busy = run(DENSE, efficiency=dataclasses.replace(IDEAL, host_s_per_launch=1e-15))
    assert get_forward(busy) == pytest.approx(get_forward(run(DENSE)))


def test_the_host_makes_up_for_small_kernels_while_large_ones_run():
    # 10 launches of 1 us fit into a forward that computes for longer, though some stretches are shorter than theirs.
    device_s = sum(get_forward(run(DENSE)).values())
    late = run(DENSE, efficiency=dataclasses.replace(IDEAL, host_s_per_launch=device_s / 10))
    assert get_forward(late) == pytest.approx(get_forward(run(DENSE)))
    later = run(DENSE, efficiency=dataclasses.replace(IDEAL, host_s_per_launch=device_s / 5))
    assert sum(get_forward(later).values()) == pytest.approx(2 * device_s)


def test_what_runs_again_takes_a_part_of_its_forward_longer_beside_its_copies():
    plain = make_layer_model(MOE, MOVING, kind="moe", efficiency=IDEAL)
    longer = make_layer_model(MOE, MOVING, kind="moe", efficiency=dataclasses.replace(IDEAL, rerun_extra=0.25))
    assert longer.segments == plain.segments
    forward_s = {segment.name: segment.forward_s for segment in plain.segments}
    assert {unit.name for unit in plain.units} >= {"layer", "moe", "core_attn", "moe_act", "expert_fc1"}
    for before, after in zip(plain.units, longer.units, strict=True):
        again_s = before.forward_part * sum(forward_s[name] for name in before.segments)
        assert again_s > 0
        assert (before.forward_part < 1) == (before.name == "dispatch")
        assert after == dataclasses.replace(before, extra_s=pytest.approx(before.extra_s + again_s / 4))


def test_each_kernel_and_each_collective_takes_a_while_to_start():
    started = dataclasses.replace(IDEAL, kernel_start_s=1.0, collective_start_s=100.0)
    segments = run(dataclasses.replace(DENSE, tensor_parallel_size=2), efficiency=started)
    # Norm and product, and the input is gathered.
    assert segments["mlp_fc1"].forward_s == pytest.approx(1 + 1 + 100)


def test_work_takes_its_operations_or_its_bytes_whichever_is_longer():
    clock = Clock(hardware=dataclasses.replace(COMPUTING, device_memory_bytes_per_s=1e9), efficiency=IDEAL)
    assert clock.time_work(Work(limit=Limit.MATMUL, flop=3e12, moved_bytes=2e9)) == pytest.approx(3)
    assert clock.time_work(Work(limit=Limit.MATMUL, flop=3e12, moved_bytes=5e9)) == pytest.approx(5)


def test_measured_times_take_the_place_of_these():
    layer = make_layer_model(DENSE, COMPUTING, kind="dense")
    measured = replace_times(layer, forward_s={"core_attn": 0.25}, backward_s={"mlp_fc1": 0.5})
    assert measured.segments[1] == dataclasses.replace(layer.segments[1], forward_s=0.25)
    assert measured.segments[3] == dataclasses.replace(layer.segments[3], backward_s=0.5)
    others = (0, 2, 4, 5)
    assert [measured.segments[i] for i in others] == [layer.segments[i] for i in others]
    assert dataclasses.replace(measured, segments=layer.segments) == layer
    assert replace_times(layer) == layer


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            {"forward_s": {"moe_act": 1.0}},
            r"forward_s names 'moe_act', and a layer of kind 'dense' has none of that name. Give some of: qkv_linear, ",
        ),
        ({"backward_s": {"core_attn": -1.0}}, r"backward_s of 'core_attn' is -1.0. Give seconds from 0 on."),
        ({"forward_s": {"core_attn": float("nan")}}, r"forward_s of 'core_attn' is nan"),
        ({"forward_s": {"core_attn": "1"}}, r"forward_s of 'core_attn' is '1'"),
    ],
)
def test_times_that_no_stretch_has_are_refused(times, message):
    with pytest.raises(ConfigError, match=message):
        replace_times(make_layer_model(DENSE, COMPUTING, kind="dense"), **times)


@pytest.mark.parametrize(
    ("hardware", "shape", "field"),
    [
        (get_hardware("ascend-910b"), DENSE, "device_memory_bytes_per_s"),
        (dataclasses.replace(COMPUTING, bf16_flop_per_s=None), DENSE, "bf16_flop_per_s"),
        (get_hardware("a100"), dataclasses.replace(DENSE, fp8_recipe="delayed"), "fp8_flop_per_s"),
    ],
)
def test_a_device_whose_rates_are_not_known_is_refused_with_the_fix(hardware, shape, field):
    with pytest.raises(ConfigError, match=rf"{hardware.name}' has no {field}, .*Give a hardware file that has it, or"):
        make_layer_model(shape, hardware, kind="any")


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (Efficiency, {"matmul": 0}, r"matmul 0 is not above 0 and at most 1. Give a part like 0.66."),
        (Efficiency, {"memory": 1.5}, r"memory 1.5 is not above 0 and at most 1"),
        (Efficiency, {"memory": float("nan")}, r"memory nan is not above 0"),
        (Efficiency, {"strided_bytes_per_s": -1.0}, r"strided_bytes_per_s -1.0 is not above 0 and finite"),
        (Efficiency, {"matmul": "0.7"}, r"matmul '0.7' is no number"),
        (Efficiency, {"host_s_per_launch": -1}, r"host_s_per_launch -1 is not from 0 on and finite. Give one like 1e-05."),
        (Efficiency, {"rerun_extra": -0.1}, r"rerun_extra -0.1 is not from 0 on and finite. Give one like 0.1."),
        (Network, {"nvlink_bytes_per_s": 0}, r"nvlink_bytes_per_s 0 is not above 0 and finite"),
        (Network, {"network_bytes_per_s": -1}, r"network_bytes_per_s -1 is not above 0 and finite"),
        (Network, {"nvlink_ranks": 0}, r"nvlink_ranks 0 is below 1"),
        (Execution, {"context_parallel_size": 0}, r"context_parallel_size 0 is below 1"),
        (Execution, {"window_tokens": 1.5}, r"window_tokens 1.5 is no whole number"),
        (Execution, {"has_fused_dropout_add": 1}, r"has_fused_dropout_add 1 is neither true nor false"),
    ],
)
def test_what_cannot_be_is_refused_with_field_value_and_fix(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


@st.composite
def shapes(draw):
    ranks = draw(st.sampled_from((1, 2, 4)))
    heads = ranks * draw(st.integers(1, 4))
    experts = None
    if draw(st.booleans()):
        spread = draw(st.sampled_from((1, 2, 16)))
        experts = ExpertsShape(
            num_experts=spread * draw(st.integers(1, 4)),
            topk=1,
            ffn_hidden_size=draw(st.integers(1, 512)),
            shared_ffn_hidden_size=ranks * draw(st.integers(0, 64)),
            expert_parallel_size=spread,
            has_fused_permutation=draw(st.booleans()),
        )
    latent = LatentShape(q_lora_rank=draw(st.sampled_from((None, 64))), kv_lora_rank=32, qk_pos_emb_head_dim=16)
    return LayerShape(
        micro_batch_size=draw(st.integers(1, 4)),
        seq_length=ranks * draw(st.integers(1, 1024)),
        hidden_size=draw(st.integers(1, 1024)),
        num_attention_heads=heads,
        num_query_groups=heads,
        qk_channels=48,
        v_channels=32,
        ffn_hidden_size=0 if experts else ranks * draw(st.integers(1, 512)),
        experts=experts,
        latent=latent if draw(st.booleans()) else None,
        tensor_parallel_size=ranks,
        has_fused_norms=draw(st.booleans()),
        has_fused_activation=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), faster=st.sampled_from(("bf16_flop_per_s", "device_memory_bytes_per_s")))
def test_no_stretch_takes_longer_on_a_device_that_is_faster_or_less_than_nothing(shape, faster):
    hardware = get_hardware("h100")
    better = dataclasses.replace(hardware, **{faster: 2 * getattr(hardware, faster)})
    efficiency = dataclasses.replace(Efficiency(), host_s_per_launch=0.0)
    slow, fast = (make_layer_model(shape, one, kind="any", efficiency=efficiency) for one in (hardware, better))
    for one, other in zip(slow.segments, fast.segments, strict=True):
        assert 0 < other.forward_s <= one.forward_s
        assert 0 < other.backward_s <= one.backward_s
        assert one.forward_extra_bytes > 0
        assert one.backward_extra_bytes > 0


@settings(deadline=None, max_examples=60)
@given(shape=shapes())
def test_twice_the_sequences_take_no_less_time_and_at_most_twice(shape):
    twice = dataclasses.replace(shape, micro_batch_size=2 * shape.micro_batch_size)
    one, two = (make_layer_model(each, get_hardware("h200"), kind="any") for each in (shape, twice))
    for way in ("forward_s", "backward_s"):
        assert getattr(one, way) <= getattr(two, way) * (1 + 1e-9)
        assert getattr(two, way) <= 2 * getattr(one, way) * (1 + 1e-9)


def test_memory_reaches_what_was_measured_of_the_device_unless_somebody_says():
    def get_part(key, **parts):
        hardware = get_hardware(key)
        return Clock(hardware=hardware, efficiency=Efficiency(**parts)).memory_bytes_per_s / hardware.device_memory_bytes_per_s

    assert get_part("h100") == pytest.approx(0.92)
    assert get_part("h200") == pytest.approx(ASSUMED_MEMORY)
    assert get_part("h100", memory=0.5) == pytest.approx(0.5)


def test_strided_kernels_are_no_faster_on_a_faster_memory():
    work = make_moves(8e9, strided_bytes=3e9)
    for key in ("h100", "h200"):
        clock = Clock(hardware=get_hardware(key))
        assert clock.time_work(work) == pytest.approx(5e9 / clock.memory_bytes_per_s + 3e9 / 1.55e12 + 3e-6)
    # Where the memory itself is slower, it counts; and without a limit it alone does.
    slow = dataclasses.replace(get_hardware("h200"), device_memory_bytes_per_s=1e12)
    assert Clock(hardware=slow).time_work(work) == pytest.approx(8e9 / 0.8e12 + 3e-6)
    free = Clock(hardware=get_hardware("h200"), efficiency=Efficiency(strided_bytes_per_s=None))
    assert free.time_work(work) == pytest.approx(8e9 / free.memory_bytes_per_s + 3e-6)
