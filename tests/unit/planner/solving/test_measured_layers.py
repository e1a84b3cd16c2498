"""Tests plans of measured layers: bytes and times of each treatment, and distance from the optimum."""

import dataclasses
import itertools

import pytest

from fgoffload import Action, ConfigError, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import SavedTensor
from fgoffload.planner.ranks.measured_layers import LayerPart, MeasuredLayer, make_rank
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.solver import solve
from fgoffload.units import MIB

OFFLOAD, RECOMPUTE, BOTH = Action.OFFLOAD, Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD
HIDDEN, MIDDLE = (SavedTensor(name=name, tags=(part,), size_bytes=8 * MIB) for name, part in (("x", "mix"), ("y", "mlp")))
INPUT = dataclasses.replace(HIDDEN, tags=("layer_input", "mix"))
LAYER = MeasuredLayer(
    kind="block",
    parts=(
        LayerPart(name="mix", forward_s=2e-3, backward_s=4e-3, input=INPUT),
        LayerPart(name="mlp", forward_s=3e-3, backward_s=6e-3, input=MIDDLE),
    ),
    tensors=(
        INPUT,
        SavedTensor(name="queries", tags=("mix",), size_bytes=40 * MIB),
        MIDDLE,
        SavedTensor(name="gates", tags=("mlp",), size_bytes=64 * MIB),
    ),
    input=INPUT,
)
TREATMENTS = [
    *({"mix": mix, "mlp": mlp} for mix, mlp in itertools.product((Action.KEEP, OFFLOAD, RECOMPUTE, BOTH), repeat=2)),
    {"layer": RECOMPUTE},
    {"layer": RECOMPUTE, "layer_input": OFFLOAD},
]


def make_plan(*layers):
    return OffloadPlan(
        actions={Site(chunk=0, layer=n, tag=tag): act for n, acts in enumerate(layers) for tag, act in acts.items()}
    )


def build(layer=LAYER):
    link = LinkModel(d2h_bytes_per_s=2e10, h2d_bytes_per_s=2e10, duplex_bytes_per_s=15e9)
    return make_rank([layer] * 2, link=link, static_bytes=0, microbatches=2)


@pytest.mark.parametrize(
    ("treatment", "moved_mib", "recompute_ms"),
    [
        ({"mix": OFFLOAD}, 48, 0),
        ({"mlp": RECOMPUTE}, 0, 3.2),  # 0.2 ms of CPU time for the checkpoint
        ({"mlp": BOTH}, 8, 3.2),
        ({"layer": RECOMPUTE, "layer_input": OFFLOAD}, 8, 5.2),
    ],
)
def test_each_treatment_offloads_and_recomputes_its_tensors(treatment, moved_mib, recompute_ms):
    # Only the second layer, since the input of the first belongs to the model.
    (found,) = simulate([build()], make_plan({}, treatment)).ranks
    assert found.d2h_bytes == 2 * moved_mib * MIB
    assert found.recompute_s == pytest.approx(2 * recompute_ms / 1e3)


@pytest.mark.parametrize("part", [0.1, 0.4, 0.7])
def test_the_plan_is_within_1_percent_of_the_optimum(part):
    rank = build()
    results = [simulate([rank], make_plan(*chosen)) for chosen in itertools.product(TREATMENTS, repeat=2)]
    least, most = min(one.peak_bytes for one in results), results[0].peak_bytes
    budget_bytes = round(least + part * (most - least))
    found = solve([rank], budget_bytes=budget_bytes).result
    assert found.peak_bytes <= budget_bytes
    assert found.step_s <= 1.01 * min(one.step_s for one in results if one.peak_bytes <= budget_bytes)


def test_a_reserved_part_name_is_rejected():
    with pytest.raises(ConfigError, match="has a reserved or duplicate name"):
        dataclasses.replace(LAYER, parts=(dataclasses.replace(LAYER.parts[0], name="layer"),))
