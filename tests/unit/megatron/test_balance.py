"""Tests that later pipeline ranks offload less: whole sites, the last of forward, in every microbatch."""

import dataclasses
from types import SimpleNamespace

import pytest
from support.trainings import MOE, make_config, make_trainer

from fgoffload.integrations.megatron.adapter import site_actions


@pytest.mark.usefixtures("parallel")
def test_bytes_kept_per_step_do_not_depend_on_the_number_of_microbatches(monkeypatch):
    # One process that is told to be the second pipeline rank.
    monkeypatch.setattr(site_actions, "load_module", lambda name: SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 1))
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
