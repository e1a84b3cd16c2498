"""Pipeline ranks that offload less, the later the less: whole sites, the last of forward, in every microbatch alike."""

import dataclasses
from types import SimpleNamespace

import pytest
from support.trainings import MOE, make_config, make_trainer

from fgoffload import Site
from fgoffload.integrations.megatron import offload as offload_module
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


@pytest.mark.usefixtures("parallel")
def test_a_rank_keeps_as_many_bytes_of_a_step_whatever_the_number_of_microbatches(monkeypatch):
    # One process that is told to be the second pipeline rank.
    monkeypatch.setattr(offload_module, "load_module", lambda name: SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 1))
    flags = MOE.replace("--global-batch-size 4", "--global-batch-size 2")
    tags, delta_bytes = ("attn_norm", "mlp_norm"), 20_000

    def run(**options):
        moved = []
        with make_trainer(flags, make_config(*tags, **options)) as trainer:
            for count in (1, 4, 4, 1, 1):
                trainer.arguments = dataclasses.replace(trainer.arguments, global_batch_size=2 * count)
                trainer.run_step()
                moved.append(trainer.integration.last_step.d2h_bytes)
        return moved

    alike, balanced = run(), run(delta_offload_bytes_across_pp_ranks=delta_bytes)
    less = [one - other for one, other in zip(alike, balanced, strict=True)]
    site_bytes = alike[0] // 4  # two tags in two layers
    assert less[0] == 0  # nothing is known yet
    assert delta_bytes <= less[2] < delta_bytes + 4 * site_bytes  # whole sites of four microbatches
    assert delta_bytes <= less[4] < delta_bytes + site_bytes
