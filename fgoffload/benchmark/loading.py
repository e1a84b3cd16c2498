"""From flags to a training, for each setting, with everything checked that can be before a model is built. Loads torch."""

from collections.abc import Iterable

import torch

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.model_flop import count_model_flop
from fgoffload.benchmark.report import Workload
from fgoffload.benchmark.settings import BASELINE, Setting
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.trainer.arguments import TrainingArguments, build_transformer_config, parse_arguments
from fgoffload.trainer.limits import refuse_what_is_not_built
from fgoffload.trainer.plan_check import check_plan_file

_CHOSEN_BY_SETTINGS = ("recompute_granularity", "cpu_offloading")
"""Fields of Megatron's config that no flag sets back: only settings may give them."""


def load_arguments(job: Job, *, world_size: int | None = None) -> TrainingArguments:
    """Return the training of a job as it is with nothing that saves memory.

    Args:
        job: What is measured.
        world_size: Processes of the training; None takes what one copy of the model needs.

    Raises:
        ConfigError: A flag cannot be what it is, contradicts what settings choose, or asks for what is not here.
    """
    arguments = parse_setting_arguments(job, BASELINE, world_size=world_size)
    for name in _CHOSEN_BY_SETTINGS:
        if arguments.transformer.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise arguments.source.refuse(f"{flag} is chosen by settings here. Leave it out, and give it as a setting.")
    refuse_what_is_not_built(arguments)
    build_transformer_config(arguments, offload=None)
    if not needs_cpu_support() and arguments.world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{arguments.source}: the model needs {arguments.world_size} GPUs, but there are {torch.cuda.device_count()}. "
            "Give smaller parallel sizes."
        )
    return arguments


def parse_setting_arguments(job: Job, setting: Setting, *, world_size: int | None = None) -> TrainingArguments:
    """Return the training of one setting.

    Args:
        job: What is measured.
        setting: Adds flags, which win over all others.
        world_size: Processes of the training; None takes what one copy of the model needs.

    Raises:
        ConfigError: A flag has a value that it cannot have, or a combination is refused.
    """
    typed = (*job.typed_flags, *setting.list_flags())
    return parse_arguments(job.file_flags, source=job.source, world_size=world_size, typed=typed, known_elsewhere=job.own_flags)


def check_plan_files(job: Job, settings: Iterable[Setting]) -> None:
    """Check the plan files among the settings: a process that measures them would find a fault only when their turn comes.

    Raises:
        ConfigError: Megatron-Core refuses the training with offload, or a plan offloads a tag that cannot leave.
        PlanError: A file cannot be read, or is of another training.
    """
    for setting in settings:
        if setting.plan is not None:
            arguments = parse_setting_arguments(job, setting, world_size=job.world_size)
            config = build_transformer_config(arguments, offload=arguments.offload)
            check_plan_file(setting.plan, arguments, config)


def describe_workload(arguments: TrainingArguments) -> Workload:
    """Return what tables and rates say about a training."""
    config = build_transformer_config(arguments, offload=None)
    return Workload(
        arguments_file=arguments.source.places[0],
        layers=config.num_layers,
        dtype=str(config.params_dtype).removeprefix("torch."),
        tokens=arguments.seq_length * arguments.global_batch_size,
        model_flop=count_model_flop(arguments, config),
        world_size=arguments.world_size,
    )
