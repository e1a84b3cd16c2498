"""Tests that later pipeline ranks offload less: they skip the last sites of forward in every microbatch."""

import dataclasses
from types import SimpleNamespace

import pytest
from support.trainings import MOE, make_config, make_trainer

from fgoffload.integrations.megatron.adapter import site_actions


@pytest.mark.usefixtures("parallel")
def test_bytes_kept_per_step_do_not_depend_on_the_number_of_microbatches(monkeypatch):
    # A single process that acts as the second pipeline rank.
    monkeypatch.setattr(site_actions, "load_module", lambda name: SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 1))
    flags = MOE.replace("--global-batch-size 4", "--global-batch-size 2")
    tags, delta_bytes = ("attn_norm", "mlp_norm"), 20_000

    def run(**options):
        offloaded = []
        with make_trainer(flags, make_config(*tags, **options)) as trainer:
            for count in (1, 4, 4, 1, 1):
                trainer.arguments = dataclasses.replace(trainer.arguments, global_batch_size=2 * count)
                trainer.run_step()
                offloaded.append(trainer.integration.last_step.d2h_bytes)
        return offloaded

    unbalanced, balanced = run(), run(delta_offload_bytes_across_pp_ranks=delta_bytes)
    difference = [one - other for one, other in zip(unbalanced, balanced, strict=True)]
    site_bytes = unbalanced[0] // 4  # two tags in two layers
    assert difference[0] == 0  # the sizes of sites are unknown yet
    assert delta_bytes <= difference[2] < delta_bytes + 4 * site_bytes  # rounded up to whole sites in four microbatches
    assert delta_bytes <= difference[4] < delta_bytes + site_bytes
