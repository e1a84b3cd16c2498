"""Which sources say what of which setting."""

import dataclasses
import logging
from pathlib import Path

import pytest
from support.toy_ranks import make_toy_layer
from support.trainings import write_plan

from fgoffload import Action, ConfigError
from fgoffload.benchmark import forecaster as forecaster_module
from fgoffload.benchmark.forecaster import Forecaster, check_profile
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.prediction import Source
from fgoffload.benchmark.settings import NOTHING, list_default_settings, parse_setting
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.training_policy import Update
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile

ARGUMENTS = Path(__file__).parents[3] / "arguments"
GIB = 2**30
DEVICE = "NVIDIA H200"
NOT_PREDICTED = ("megatron:core_attn", "te-layers:1", "save_on_cpu")


def make_job(folder=Path(), *, name="w2_moe"):
    path = ARGUMENTS / f"{name}.sh"
    flags = tuple(read_argument_file(path, variables={}))
    return Job(source=f"{name}.sh", file_flags=flags, warmup=1, steps=1, plan_folder=folder)


def make_profile(*, layers=6, device=DEVICE, **options):
    """Return a profile whose stretches take some seconds each: nothing of the table."""
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


def make_forecaster(job=None, *, device=DEVICE, profile=None):
    forecaster = Forecaster(job or make_job(), profile=profile)
    forecaster.meet(device)
    return forecaster


@pytest.mark.parametrize("name", ["w2_moe", "mla_moe", "llama3_8b_layers", "launch_bound_moe"])
def test_every_default_setting_that_the_planner_has_words_for_is_predicted_from_the_table(name, tmp_path):
    job = make_job(tmp_path, name=name)
    forecaster = make_forecaster(job)
    settings = list_default_settings(parse_setting_arguments(job, NOTHING).transformer, budgets_bytes=[20 * GIB])
    write_plan(job.find_plan_path(parse_setting("budget:20GiB")), {(0, "layer"): Action.RECOMPUTE})
    nothing = forecaster.predict(NOTHING).predictions[Source.TABLE]
    assert nothing.ratio == 1
    for setting in settings:
        found = forecaster.predict(setting)
        assert found.reasons == {}
        assert bool(found.predictions) is not setting.name.startswith(("megatron", "te-layers", "save_on_cpu")), setting.name
        for prediction in found.predictions.values():
            assert prediction.ratio >= 1
            # A recompute of attention keeps more than it drops: docs/formulas.md.
            assert prediction.static_bytes < prediction.peak_bytes
            assert prediction.peak_bytes <= nothing.peak_bytes or setting.recompute == ("core_attn",)


@pytest.mark.parametrize("name", NOT_PREDICTED)
def test_settings_of_others_engines_have_no_prediction_and_no_reason(name):
    found = make_forecaster(profile=make_profile()).predict(parse_setting(name))
    assert (found.predictions, found.reasons) == ({}, {})


def test_a_device_that_the_table_does_not_have_leaves_the_profile():
    assert make_forecaster(device="CPU").predict(NOTHING).predictions == {}
    found = make_forecaster(device="CPU", profile=make_profile(device="CPU")).predict(NOTHING)
    assert set(found.predictions) == {Source.PROFILE}


def test_both_sources_predict_with_their_own_times_and_bytes():
    found = make_forecaster(profile=make_profile()).predict(parse_setting("recompute:full"))
    assert set(found.predictions) == set(Source)
    profile = found.predictions[Source.PROFILE]
    # Six layers of four microbatches: 10 s forward, twice as much backward, and forward again.
    assert profile.step_s == pytest.approx(4 * 6 * 40)
    assert profile.static_bytes == 1000
    assert found.predictions[Source.TABLE].step_s < 1


def test_a_profile_is_used_with_the_microbatches_of_the_training(tmp_path):
    job = dataclasses.replace(make_job(tmp_path), typed_flags=("--global-batch-size", "16"))
    found = make_forecaster(job, profile=make_profile()).predict(NOTHING)
    assert found.predictions[Source.PROFILE].step_s == pytest.approx(8 * 6 * 30)


def test_the_profile_of_another_device_is_not_used():
    found = make_forecaster(profile=make_profile(device="NVIDIA H100")).predict(NOTHING)
    assert set(found.predictions) == {Source.TABLE}
    assert found.reasons == {Source.PROFILE: "the profile is of NVIDIA H100, and this is NVIDIA H200. Measure one here."}


def test_what_the_model_runs_again_and_the_profile_does_not_know_has_a_reason():
    found = make_forecaster(profile=make_profile()).predict(parse_setting("recompute:layernorm"))
    assert set(found.predictions) == {Source.TABLE}
    assert found.reasons[Source.PROFILE] == "nothing is known of what it takes to run layers.0.mlp_norm again by itself."


def test_a_model_that_the_planner_cannot_plan_is_predicted_from_the_profile_alone():
    forecaster = make_forecaster(make_job(name="tiny_moe"), profile=make_profile(layers=4))
    full, norm = (forecaster.predict(parse_setting(name)) for name in ("recompute:full", "recompute:layernorm"))
    assert set(full.predictions) == {Source.PROFILE}
    assert "activation_dtype_bytes 4" in full.reasons[Source.TABLE]
    assert norm.predictions == {}


def test_the_measured_profile_is_read_from_the_folder(tmp_path):
    job = make_job(tmp_path)
    forecaster = make_forecaster(job)
    make_profile().save(job.profile_path)
    forecaster.read_profile()
    assert Source.PROFILE in forecaster.predict(NOTHING).predictions


def test_a_plain_step_that_is_known_better_is_what_nothing_is_predicted_to_take_and_is_in_the_file(tmp_path):
    job = make_job(tmp_path)
    forecaster = make_forecaster(job)
    make_profile(plain_step_s=1000.0).save(job.profile_path)
    forecaster.read_profile()
    full = parse_setting("recompute:full")
    before = [forecaster.predict(setting).predictions[Source.PROFILE].step_s for setting in (NOTHING, full)]
    forecaster.renew_plain_step(1010.0)
    after = [forecaster.predict(setting).predictions[Source.PROFILE].step_s for setting in (NOTHING, full)]
    assert before[0] == pytest.approx(1000)
    assert after == pytest.approx([1010, 1.01 * before[1]])  # no layer lets the host wait
    assert Profile.load(job.profile_path) == make_profile(plain_step_s=1010.0)


def test_a_profile_that_is_not_there_or_cannot_be_written_gets_no_other_plain_step(tmp_path, caplog):
    make_forecaster(make_job(tmp_path)).renew_plain_step(1.0)
    forecaster = make_forecaster(make_job(tmp_path / "gone"), profile=make_profile(plain_step_s=1000.0))
    forecaster.renew_plain_step(1010.0)
    assert "The profile keeps the plain step of its minute: profile" in caplog.text
    assert forecaster.predict(NOTHING).predictions[Source.PROFILE].step_s == pytest.approx(1010)


def test_a_measured_profile_that_cannot_be_read_costs_its_predictions_alone(tmp_path, caplog):
    forecaster = make_forecaster(make_job(tmp_path))
    forecaster.read_profile()
    assert set(forecaster.predict(NOTHING).predictions) == {Source.TABLE}
    assert "Nothing is predicted from the profile: profile" in caplog.text


def test_a_fault_of_the_planner_costs_a_prediction_and_is_logged(monkeypatch, caplog):
    def fail(*args, **options):
        raise KeyError("boom")

    monkeypatch.setattr(forecaster_module, "predict", fail)
    with caplog.at_level(logging.WARNING):
        found = make_forecaster().predict(NOTHING)
    assert found.reasons == {Source.TABLE: "KeyError: 'boom'"}
    assert "nothing is not predicted from the hardware table" in caplog.text


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (make_profile(layers=4, has_optimizer=False), "p.json is of 4 layers, and the model has 6. Give --profile without"),
        (
            make_profile(),
            r"p.json was measured with an optimizer, and this benchmark runs without an optimizer \(--with-optimizer\)",
        ),
    ],
)
def test_a_profile_of_another_training_is_refused(profile, message):
    arguments = parse_setting_arguments(make_job(), NOTHING)
    with pytest.raises(ConfigError, match=message):
        check_profile(profile, arguments, update=Update.NONE, source="p.json")


def test_a_profile_of_this_training_is_taken():
    arguments = parse_setting_arguments(make_job(), NOTHING)
    check_profile(make_profile(has_optimizer=False), arguments, update=Update.NONE, source="p.json")
    check_profile(make_profile(), arguments, update=Update.ADAMW, source="p.json")
