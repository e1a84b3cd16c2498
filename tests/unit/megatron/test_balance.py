"""Pipeline ranks that offload less, the later the less: whole sites, the last of forward, in every microbatch alike."""

import hypothesis
import hypothesis.strategies as st
import pytest
from support.pipeline import run_pipeline
from support.trainings import ATTENTION_TAGS, MOE

from fgoffload import Site
from fgoffload.integrations.megatron.balance import choose_kept

SIZES = {
    Site(chunk=0, layer=layer, tag=tag): size
    for layer in range(2)
    for tag, size in (("core_attn", 30), ("attn_proj", 0), ("moe_act", 10))
}


@pytest.mark.parametrize(
    ("less_bytes", "kept"),
    [
        (0, []),
        (1, ["1.moe_act"]),
        (10, ["1.moe_act"]),
        (11, ["1.moe_act", "1.attn_proj", "1.core_attn"]),
        (41, ["1.moe_act", "1.attn_proj", "1.core_attn", "0.moe_act"]),
    ],
)
def test_the_last_sites_stay(less_bytes, kept):
    assert [f"{site.layer}.{site.tag}" for site in choose_kept(SIZES, less_bytes=less_bytes)] == kept


@hypothesis.given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 1000))
def test_no_more_stays_than_asked_but_for_less_than_one_site(sizes, less_bytes):
    moved = {Site(chunk=0, layer=layer, tag="x"): size for layer, size in enumerate(sizes)}
    kept = choose_kept(moved, less_bytes=less_bytes)
    kept_bytes = sum(moved[site] for site in kept)
    if kept_bytes < less_bytes:
        assert kept_bytes == sum(sizes)  # all there is
    elif kept:
        assert kept_bytes - moved[kept[-1]] < less_bytes
    else:
        assert less_bytes == 0


def test_each_pipeline_rank_offloads_less_than_the_one_before_and_the_bits_stay():
    shape = f"{MOE} --num-layers 4 --global-batch-size 8 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"
    argv = [
        *f"{shape} --min-offloaded-tensor-size 64 --fine-grained-activation-offloading --offload-modules".split(),
        *ATTENTION_TAGS,
    ]
    delta_bytes = 200 * 1024
    expected = run_pipeline(argv, processes=2, steps=3)
    alike = run_pipeline(argv, processes=2, steps=3, offload=True)
    balanced = run_pipeline(
        [*argv, "--delta-offload-bytes-across-pp-ranks", str(delta_bytes)], processes=2, steps=3, offload=True
    )
    for stages in (alike, balanced):
        assert [(stage.losses, stage.gradient_digests) for stage in stages] == [
            (s.losses, s.gradient_digests) for s in expected
        ]
    first, second = (
        sum(one.transfers.values()) - sum(other.transfers.values()) for one, other in zip(alike, balanced, strict=True)
    )
    assert first == 0
    largest_site = max(alike[1].transfers.values()) // 2  # two layers
    assert delta_bytes <= second < delta_bytes + largest_site
