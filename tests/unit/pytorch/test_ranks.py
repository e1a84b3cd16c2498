"""Tests DDP and FSDP2 on two Gloo processes: losses and gradients are bitwise identical, and no parameter is offloaded."""

import dataclasses
import functools

import pytest
from support.models import ATTN_BYTES, LAYERS, MLP_BYTES, make_net
from support.ranks import MICROBATCHES, RankResult, Scenario, run_ranks

PLAIN = [
    Scenario("ddp", "none"),
    Scenario("fsdp2", "none", reshard=True, dtype="float32"),
    Scenario("fsdp2", "none", reshard=True, dtype="bfloat16"),
    Scenario("fsdp2", "none", reshard=False, dtype="bfloat16"),
]
FEW = [
    Scenario("ddp", "modules"),
    *(dataclasses.replace(PLAIN[2], offload=offload) for offload in ("modules", "block", "budget")),
]
MORE = [dataclasses.replace(plain, offload=offload) for plain in PLAIN for offload in ("modules", "before", "block")]


def name(scenario: Scenario) -> str:
    return "-".join(map(str, dataclasses.astuple(scenario)))


@functools.cache
def run_all(*, is_slow: bool) -> dict[Scenario, list[RankResult]]:
    offloaded = MORE if is_slow else FEW
    return run_ranks([plain for plain in PLAIN if is_slow or plain in (PLAIN[0], PLAIN[2])] + offloaded)


EACH_SCENARIO = pytest.mark.parametrize(
    ("scenario", "is_slow"),
    [
        *(pytest.param(scenario, False, id=name(scenario)) for scenario in FEW),
        *(pytest.param(one, True, id=name(one), marks=pytest.mark.slow) for one in MORE if one not in FEW),
    ],
)


@EACH_SCENARIO
def test_losses_and_gradients_are_bitwise_identical_on_every_rank(scenario, is_slow):
    results = run_all(is_slow=is_slow)
    plain = results[dataclasses.replace(scenario, offload="none")]
    for one, other in zip(plain, results[scenario], strict=True):
        assert one.losses == other.losses
        assert one.gradients == other.gradients
    assert plain[0].losses != plain[1].losses  # each rank has its own data


@EACH_SCENARIO
def test_only_activations_are_offloaded_and_no_parameter_is_inspected(scenario, is_slow):
    shapes = {tuple(parameter.shape) for parameter in make_net().parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    itemsize = 2 if scenario.dtype == "bfloat16" else 4
    for rank in run_all(is_slow=is_slow)[scenario]:
        assert not shapes & set(map(tuple, rank.asked))
        if scenario.offload == "budget":
            continue
        if scenario.offload == "block":
            assert rank.moved["saved"] > 0
        else:
            parts = {"attn": ATTN_BYTES, "mlp": MLP_BYTES}
            assert rank.moved == {tag: MICROBATCHES * LAYERS * size_bytes * itemsize // 4 for tag, size_bytes in parts.items()}


def test_all_ranks_use_the_same_memory_budget_plan():
    plans = [rank.plan for rank in run_all(is_slow=False)[FEW[-1]]]
    assert plans[0] == plans[1]
    assert "offload" in plans[0][0] or "recompute" in plans[0][0]
