"""DDP and FSDP2 over two processes on Gloo: every loss and gradient equal to the bit, and no parameter moves."""

import dataclasses

import pytest
from support.models import ATTN_BYTES, LAYERS, MLP_BYTES, make_net
from support.ranks import MICROBATCHES, RankResult, Scenario, run_ranks

PLAIN = [
    Scenario("ddp", "none"),
    Scenario("fsdp2", "none", reshard=True, dtype="float32"),
    Scenario("fsdp2", "none", reshard=True, dtype="bfloat16"),
    Scenario("fsdp2", "none", reshard=False, dtype="bfloat16"),
]
OFFLOADED = [dataclasses.replace(plain, offload=offload) for plain in PLAIN for offload in ("modules", "before", "block")]


def name(scenario: Scenario) -> str:
    return "-".join(map(str, dataclasses.astuple(scenario)))


@pytest.fixture(scope="module")
def results() -> dict[Scenario, list[RankResult]]:
    return run_ranks([*PLAIN, *OFFLOADED])


@pytest.mark.parametrize("scenario", OFFLOADED, ids=name)
def test_losses_and_gradients_are_equal_to_the_bit_on_every_rank(results, scenario):
    plain = results[dataclasses.replace(scenario, offload="none")]
    for one, other in zip(plain, results[scenario], strict=True):
        assert one.losses == other.losses
        assert one.gradients == other.gradients
    assert plain[0].losses != plain[1].losses  # each rank has its own data


@pytest.mark.parametrize("scenario", OFFLOADED, ids=name)
def test_what_moves_are_the_activations_and_no_parameter_is_even_asked_for(results, scenario):
    shapes = {tuple(parameter.shape) for parameter in make_net().parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    itemsize = 2 if scenario.dtype == "bfloat16" else 4
    for rank in results[scenario]:
        assert not shapes & set(map(tuple, rank.asked))
        if scenario.offload == "block":
            assert rank.moved["saved"] > 0
        else:
            parts = {"attn": ATTN_BYTES, "mlp": MLP_BYTES}
            assert rank.moved == {tag: MICROBATCHES * LAYERS * size_bytes * itemsize // 4 for tag, size_bytes in parts.items()}
