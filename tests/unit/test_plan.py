"""Tests `OffloadPlan`: JSON, fractions, and the checks of a plan file."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fgoffload.errors import PlanError
from fgoffload.plan import FORMAT, FP8_RECIPE, MICROBATCHES, TOKENS, Action, OffloadPlan, Site
from fgoffload.tags import default_tags

pytestmark = pytest.mark.quick

SITES = st.builds(Site, chunk=st.integers(0, 7), layer=st.integers(0, 127), tag=st.sampled_from(default_tags().names))
PLANS = st.builds(
    OffloadPlan,
    actions=st.dictionaries(SITES, st.sampled_from(Action)),
    made_for=st.none() | st.dictionaries(st.text(), st.integers(0, 2**63) | st.text()),
)


def make_sites(count):
    return [Site(chunk=0, layer=layer, tag="core_attn") for layer in range(count)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(PLANS)
def test_a_plan_survives_a_round_trip_through_json(plan):
    assert OffloadPlan.from_json(plan.to_json(), source="test") == plan


@pytest.mark.parametrize(
    ("fraction", "count", "offloaded"),
    [(0.9, 10, 9), (0.8, 10, 8), (0.29, 100, 29), (0.0, 10, 0), (1.0, 10, 10), (0.5, 3, 1), (0.7, 0, 0), (0.999, 1, 0)],
)
def test_a_fraction_offloads_a_whole_number_of_sites(fraction, count, offloaded):
    plan = OffloadPlan.from_fraction(make_sites(count), fraction)
    assert plan.count(Action.OFFLOAD) == offloaded
    assert plan.count(Action.KEEP) == count - offloaded


@settings(deadline=None)
@given(count=st.integers(0, 60), fraction=st.floats(0, 1))
def test_a_fraction_keeps_the_last_sites_of_forward(count, fraction):
    sites = make_sites(count)
    plan = OffloadPlan.from_fraction(sites, fraction)
    offloaded = plan.count(Action.OFFLOAD)
    assert [plan.get_action(site) for site in sites] == [Action.OFFLOAD] * offloaded + [Action.KEEP] * (count - offloaded)


MADE_FOR = {"num_layers": 4, "hidden_size": 128, FP8_RECIPE: "delayed", MICROBATCHES: 3, TOKENS: 512}


@pytest.mark.parametrize(
    "found",
    [{}, MADE_FOR, {"num_layers": 4, "others": 7}, {TOKENS: 512}, {TOKENS: 256, MICROBATCHES: 1}],
    ids=lambda found: str(len(found)),
)
def test_a_plan_is_valid_for_its_training_and_for_fewer_or_smaller_microbatches(found):
    OffloadPlan(actions={}, made_for=MADE_FOR).check_made_for(found)
    OffloadPlan(actions={}).check_made_for(found)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({"hidden_size": 256, "num_layers": 6}, "num_layers 4, but this training run has 6"),
        ({TOKENS: 513}, "tokens 512, but this training run has 513"),
        ({MICROBATCHES: 4}, "microbatches 3, but this training run has 4"),
    ],
)
def test_a_plan_for_another_training_is_rejected_with_the_first_difference(found, difference):
    with pytest.raises(
        PlanError, match=rf"^The plan was made for {difference}\. Plan again for this run, or delete `made_for` from"
    ):
        OffloadPlan(actions={}, made_for=MADE_FOR).check_made_for(found)


@pytest.mark.parametrize(("document", "found"), [({}, "None"), ([], "None"), ({"format": 2, "sites": []}, "2"), ("x", "None")])
def test_another_plan_format_is_rejected_with_both_formats(document, found):
    with pytest.raises(PlanError) as caught:
        OffloadPlan.from_json(json.dumps(document), source="plan.json")
    assert str(caught.value) == f"plan.json has plan format {found}, but this version reads format {FORMAT}. Plan again."


def test_an_unknown_plan_key_is_rejected():
    with pytest.raises(PlanError) as caught:
        OffloadPlan.from_json(json.dumps({"format": FORMAT, "sites": [], "loss_window": 5}), source="plan.json")
    assert str(caught.value) == (
        "plan.json has the unknown key 'loss_window'. Remove it. Valid keys: format, made_for, loss_window_bytes, "
        "predicted, sites."
    )


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"chunk": 0, "layer": 1, "tag": "core_attn"},
        {"chunk": "x", "layer": 1, "tag": "core_attn", "action": "keep"},
        {"chunk": True, "layer": 1, "tag": "core_attn", "action": "keep"},
        {"chunk": 0, "layer": 1, "tag": "core_attn", "action": "drop"},
    ],
)
def test_an_invalid_site_is_rejected_with_its_row(row):
    good = {"chunk": 0, "layer": 0, "tag": "core_attn", "action": "offload"}
    with pytest.raises(PlanError) as caught:
        OffloadPlan.from_json(json.dumps({"format": FORMAT, "sites": [good, row]}), source="plan.json")
    assert str(caught.value) == (
        f"plan.json: row 1 of `sites` is {row!r}. It needs chunk and layer (integers), tag, and action "
        "(keep, recompute, offload, recompute+offload)."
    )


def test_a_duplicate_site_is_rejected():
    row = {"chunk": 0, "layer": 3, "tag": "core_attn", "action": "offload"}
    text = json.dumps({"format": FORMAT, "sites": [row, {**row, "action": "keep"}]})
    with pytest.raises(PlanError, match=r"plan.json: row 1 of `sites` repeats layers\.3\.core_attn of chunk 0\. Remove"):
        OffloadPlan.from_json(text, source="plan.json")
