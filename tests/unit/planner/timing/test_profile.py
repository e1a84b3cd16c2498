"""Tests profiles: JSON round trips, errors, and the ranks and link of the simulator."""

import dataclasses
import json

import pytest

from fgoffload import ConfigError
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile, make_rank_model

LINK = LinkProfile(
    copies=(
        # 64 KiB take 6.756 us at 9.7 GB/s, and 1.311 us (D2H) and 1.236 us (H2D) at the rates of large copies.
        CopyRate(size_bytes=65536, d2h_bytes_per_s=9.7e9, h2d_bytes_per_s=9.7e9, duplex_bytes_per_s=8e9),
        CopyRate(size_bytes=2**28, d2h_bytes_per_s=50e9, h2d_bytes_per_s=53e9, duplex_bytes_per_s=33.5e9),
    ),
    compute_slowdown=0.06,
)


def make_layer(kind, *, forward_s=1.0, backward_s=2.0, size_bytes=1000, wait=None):
    return LayerModel(
        kind=kind,
        segments=(
            Segment(name="attn_norm", forward_s=0.0, backward_s=0.0),
            Segment(name="core_attn", forward_s=forward_s, backward_s=backward_s, backward_extra_bytes=7, host_wait=wait),
        ),
        tensors=(
            SavedTensor(name="input", tags=("attn_norm",), size_bytes=size_bytes),
            SavedTensor(name="output", tags=("core_attn", "attn_proj"), size_bytes=10),
        ),
        units=(
            UnitModel(
                name="layer",
                segments=("attn_norm", "core_attn"),
                drops=("output",),
                keeps=(SavedTensor(name="mask", tags=(), size_bytes=size_bytes // 2),),
                before="core_attn",
            ),
        ),
    )


def make_profile(*layers, microbatches=4, stages=2, rank=0):
    numbered = tuple(NumberedLayer(number=number, model=layer) for number, layer in enumerate(layers))
    first = (Segment(name="first", forward_s=0.5, backward_s=0.25),)
    return Profile(
        device="a device",
        versions={"torch": "2.13.0"},
        date="2026-11-22",
        link=LINK,
        ranks=(
            RankProfile(
                rank=rank,
                pipeline=Pipeline(microbatches=microbatches, stages=stages),
                chunks=(ChunkModel(layers=numbered, first=first, saved_bytes=33),),
                static_bytes=5000,
                step_s=12.5,
                step_end_s=0.5,
                min_offloaded_numel=64,
            ),
        ),
    )


PROFILE = make_profile(make_layer("moe (layer 0)", wait=HostWait.HOLD), make_layer("moe (layer 1)", forward_s=5.0))


def test_a_profile_survives_a_round_trip_through_a_file(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE


def change(*path, to):
    """Return the profile's document with the value at `path` replaced, or deleted if `to` is `...`."""
    document = json.loads(PROFILE.to_json())
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return json.dumps(document)


LAYER = ("ranks", 0, "chunks", 0, "layers", 0, "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json is not JSON: "),
        (change("format", to=1), "p.json is a profile of format 1; this version reads format 3. Measure again."),
        (change("divice", to="x"), "p.json: the document has no field 'divice'. Did you mean 'device'?"),
        (change("ranks", 0, "rank", to=True), "p.json: ranks[0].rank is True. Use a whole number of at least 0."),
        (change("ranks", 0, "step_s", to=float("inf")), "p.json: ranks[0].step_s is inf. Use a finite number of at least 0."),
        (change("ranks", 0, "pipeline", "stages", to=0), "p.json: ranks[0].pipeline: stages 0 is below 1. Use 1 or more."),
        (
            change(*LAYER, "segments", 1, "host_wait", to="never"),
            "p.json: ranks[0].chunks[0].layers[0].model.segments[1].host_wait is 'never'. Use one of: kernel, hold, copy.",
        ),
        (
            change("link", "copies", 0, "size_bytes", to=2**28),
            "p.json: link: copies have sizes [268435456, 268435456], in bytes.",
        ),
        (change("plain_step_s", to=0.0), "p.json: the document: plain_step_s 0.0 is not a step time. Use"),
    ],
)
def test_profile_errors_name_the_faulty_field(text, message):
    with pytest.raises(ConfigError) as caught:
        Profile.from_json(text, source="p.json")
    assert str(caught.value).startswith(message)


def test_link_rates_use_the_largest_copies_and_latency_uses_the_smallest():
    link = LINK.to_model()
    assert (link.d2h_bytes_per_s, link.h2d_bytes_per_s, link.duplex_bytes_per_s) == (50e9, 53e9, 33.5e9)
    assert link.compute_slowdown == 0.01  # kernels of a step load the device less than the measured matrix product
    d2h, h2d = 65536 / 9.7e9 - 65536 / 50e9, 65536 / 9.7e9 - 65536 / 53e9
    assert link.copy_latency_s == pytest.approx((d2h + h2d) / 2, rel=1e-12)


def test_a_link_only_profile_has_no_ranks_and_the_error_has_a_fix():
    profile = dataclasses.replace(PROFILE, ranks=())
    assert Profile.from_json(profile.to_json(), source="text") == profile
    with pytest.raises(ConfigError, match=r"rank 0 is not in the profile, which has only the link\. Profile a model"):
        make_rank_model(profile, rank=0)
    with pytest.raises(ConfigError, match=r"rank 1 is not in the profile\. Use one of: 0\."):
        make_rank_model(PROFILE, rank=1)
