"""Checks that a plan file belongs to a training, before its model is built."""

from pathlib import Path
from typing import Any

from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.adapter.model_config import read_facts
from fgoffload.plan import MICROBATCHES, TOKENS, OffloadPlan, naming_plan_file
from fgoffload.trainer.training_arguments import TrainingArguments


def check_plan_file(path: Path, arguments: TrainingArguments, config: Any) -> None:
    """Check a plan file against a training, as far as possible before a model is built.

    Raises:
        ConfigError: The plan offloads an unknown tag, or a tag without the tags that it requires.
        PlanError: The file cannot be read, was made for another training, or names a layer that does not exist.
    """
    plan, name = OffloadPlan.load(path), f"--offload-plan {path}"
    step = {
        TOKENS: arguments.seq_length * arguments.micro_batch_size,
        MICROBATCHES: arguments.num_microbatches,  # once the batch has ramped up
    }
    with naming_plan_file(path):
        plan.check_made_for({**read_facts(config), **step})
    if arguments.offload is not None:
        arguments.offload.tags.check(plan.offloaded_tags, flag=name)
    layers = config.num_layers + (config.mtp_num_layers or 0)
    chunks = arguments.virtual_pipeline_size or 1
    for site in plan.actions:
        if site.layer not in range(layers) or site.chunk not in range(chunks):
            raise PlanError(
                f"{name} names {site} in chunk {site.chunk}, and the model has {layers} layers and {chunks} "
                "chunk(s) a rank, counted from 0. Plan for this model."
            )
