"""Parses the flags of each setting, and checks them before a model is built. Loads torch."""

from collections.abc import Iterable

import torch

from fgoffload.benchmark.job import Job, Workload
from fgoffload.benchmark.settings import BASELINE, Setting
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments
from fgoffload.trainer.limits import check_plan_file, check_supported
from fgoffload.trainer.training_arguments import TrainingArguments

_CHOSEN_BY_SETTINGS = ("recompute_granularity", "cpu_offloading")
"""Fields of Megatron's config that no flag can reset. Therefore, only settings may set them, not the argument file."""


def load_arguments(job: Job) -> TrainingArguments:
    """Return the arguments of the baseline after checking that this machine can run the model.

    Raises:
        ConfigError: A flag is invalid or conflicts with the settings, or the model needs more GPUs than this machine has.
    """
    arguments = parse_setting_arguments(job, BASELINE)
    for name in _CHOSEN_BY_SETTINGS:
        if arguments.transformer.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise arguments.source.refuse(f"{flag} is controlled by the settings of a benchmark. Remove it and use --settings.")
    check_supported(arguments)
    build_transformer_config(arguments, offload=None)
    if not needs_cpu_support() and arguments.world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{arguments.source}: the model needs {arguments.world_size} GPUs, but this machine has "
            f"{torch.cuda.device_count()}. Use smaller parallel sizes."
        )
    return arguments


def parse_setting_arguments(job: Job, setting: Setting) -> TrainingArguments:
    """Return the training arguments of one setting, whose flags override all others."""
    return parse_arguments(
        job.file_flags,
        source=job.source,
        world_size=job.world_size,
        typed=(*job.typed_flags, *setting.list_flags()),
        known_elsewhere=job.own_flags,
    )


def check_plan_files(job: Job, settings: Iterable[Setting]) -> None:
    """Check the settings' plan files early. Otherwise, an error would appear only when a process reaches the setting.

    Raises:
        ConfigError: Megatron-Core rejects the flags, or a plan offloads an unknown tag.
        PlanError: A file cannot be read, or was made for another training run.
    """
    for setting in settings:
        if setting.plan is not None:
            arguments = parse_setting_arguments(job, setting)
            config = build_transformer_config(arguments, offload=arguments.offload)
            check_plan_file(setting.plan, arguments, config)


def describe_workload(arguments: TrainingArguments) -> Workload:
    """Return the size of a training run for titles and throughput."""
    return Workload(
        arguments_file=arguments.source.places[0],
        layers=arguments.transformer["num_layers"],
        tokens=arguments.seq_length * arguments.global_batch_size,
        world_size=arguments.world_size,
    )
