"""Tests predictions of settings from the hardware table and from a profile."""

from pathlib import Path

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank
from support.trainings import write_plan

from fgoffload import Action, ConfigError, OffloadPlan, PlanError
from fgoffload.benchmark import prediction
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.prediction import Forecaster, Source, predict
from fgoffload.benchmark.rank_models import check_profile
from fgoffload.benchmark.settings import BASELINE, list_default_settings, parse_setting
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile

ARGUMENTS = Path(__file__).parents[3] / "arguments"
DEVICE = "NVIDIA H200"


def make_job(folder=Path(), *, name="w2_moe", profile=None):
    path = ARGUMENTS / f"{name}.sh"
    flags = tuple(read_argument_file(path, variables={}))
    return Job(source=f"{name}.sh", file_flags=flags, warmup=1, steps=1, folder=folder, profile=profile)


def make_profile(*, layers=6, device=DEVICE, **options):
    """Return a profile with segments of a few seconds, unlike the hardware table."""
    numbered = tuple(
        NumberedLayer(number=number, model=make_toy_layer(kind=f"moe (layer {number})", sizes=(1, 8, 6, 4, 2)))
        for number in range(layers)
    )
    rank = RankProfile(
        rank=0,
        pipeline=Pipeline(microbatches=4),
        chunks=(ChunkModel(layers=numbered),),
        static_bytes=1000,
        step_s=1.0,
        min_offloaded_numel=1,
    )
    copies = (CopyRate(size_bytes=1, d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, duplex_bytes_per_s=1e6),)
    link = LinkProfile(copies=copies, compute_slowdown=0.0)
    return Profile(device=device, versions={}, date="today", link=link, ranks=(rank,), **options)


RANKS = [make_toy_rank(pipeline=Pipeline(microbatches=3), static_bytes=100)]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("recompute:full", {"layers.0.layer: recompute", "layers.1.layer: recompute"}),
        ("ours:core_attn@0.5", {"layers.0.core_attn: offload"}),
        (
            "ours:expert_fc1/moe_act",
            {f"layers.{layer}.{row}" for layer in (0, 1) for row in ("moe_act: recompute", "expert_fc1: offload")},
        ),
    ],
)
def test_a_setting_is_predicted_from_the_plan_of_its_flags(name, rows, monkeypatch):
    plans = []

    def simulate_and_record(ranks, plan):
        plans.append(plan)
        return simulate(ranks, plan)

    monkeypatch.setattr(prediction, "simulate", simulate_and_record)
    predicted = predict(RANKS, parse_setting(name))
    plan, baseline = plans
    assert {f"{site}: {action.value}" for site, action in plan.actions.items()} == rows
    assert baseline == OffloadPlan(actions={})
    simulated = simulate(RANKS, plan)
    assert (predicted.step_s, predicted.peak_bytes, predicted.static_bytes) == (simulated.step_s, simulated.peak_bytes, 100)
    assert predicted.ratio == simulated.step_s / simulate(RANKS, baseline).step_s


def test_recompute_without_a_known_time_is_not_predicted():
    with pytest.raises(PlanError, match="no recompute time for mla_up_proj"):
        predict(RANKS, parse_setting("recompute:mla_up_proj"))


def test_a_plan_for_another_model_is_rejected(tmp_path):
    setting = parse_setting(f"plan:{write_plan(tmp_path / 'x.json', {(99, 'core_attn'): Action.OFFLOAD})}")
    with pytest.raises(PlanError, match=r"layers\.99"):
        predict(RANKS, setting)
    with pytest.raises(PlanError, match="No such file"):
        predict(RANKS, parse_setting("budget:1GiB").with_plan(Path("none.json")))


def test_a_profile_of_another_device_is_not_used(tmp_path):
    make_profile(has_optimizer=False).save(tmp_path / "p.json")
    job = make_job(profile=tmp_path / "p.json")
    assert set(Forecaster(job, DEVICE).predict(BASELINE)) == {Source.TABLE, Source.PROFILE}
    assert set(Forecaster(job, "NVIDIA H100 80GB HBM3").predict(BASELINE)) == {Source.TABLE}


def test_the_hardware_table_predicts_every_default_setting_that_the_planner_models(tmp_path):
    job = make_job(tmp_path, name="mla_moe")
    forecaster = Forecaster(job, DEVICE)
    settings = [*list_default_settings(parse_setting_arguments(job, BASELINE).transformer), parse_setting("budget:20GiB")]
    write_plan(job.find_plan_path(parse_setting("budget:20GiB")), {(0, "layer"): Action.RECOMPUTE})
    baseline = forecaster.predict(BASELINE)[Source.TABLE]
    assert baseline.ratio == 1
    for setting in settings:
        found = forecaster.predict(setting)
        assert bool(found) is not setting.name.startswith(("megatron", "te-layers", "save_on_cpu")), setting.name
        for one in found.values():
            assert one.ratio >= 1
            # Recompute of attention saves more than it drops: docs/reference/saved_bytes.md.
            assert one.static_bytes < one.peak_bytes
            assert one.peak_bytes <= baseline.peak_bytes or setting.recompute == ("core_attn",)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (make_profile(layers=4, has_optimizer=False), "p.json has 4 layers, but the model has 6. Use --profile without"),
        (make_profile(), r"p.json was measured with an optimizer, but this benchmark runs without an optimizer"),
    ],
)
def test_a_profile_of_another_training_is_rejected(profile, message, tmp_path):
    profile.save(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=message):
        check_profile(make_job(profile=tmp_path / "p.json"), parse_setting_arguments(make_job(), BASELINE))
