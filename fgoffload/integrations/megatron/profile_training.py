"""Measures a whole training that `fgoffload train` can run: a warm-up step, and the step that counts."""

import contextlib
import dataclasses
import datetime
from typing import Any

import torch

from fgoffload.config import AUTO, DEFAULT_MIN_OFFLOADED_TENSOR_SIZE, OffloadConfig
from fgoffload.engine import Device, find_device
from fgoffload.integrations.link import measure_link
from fgoffload.integrations.megatron.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.data import TokenSource
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.profiling import StepMeasurement
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.integrations.megatron.training_arguments import TrainingArguments
from fgoffload.integrations.megatron.training_policy import Kernels, TrainingPolicy, Update
from fgoffload.planner.timing.profile import LinkProfile, Profile, RankProfile, merge_processes
from fgoffload.units import TIB


def get_training_device() -> Device:
    """Return the device that trainings of this process run on."""
    return find_device("cpu" if needs_cpu_support() else "cuda")


def profile_link(device: Device) -> Profile:
    """Return a profile of the link of `device` alone."""
    return _make_profile(measure_link(device), ())


def profile_training(
    arguments: TrainingArguments, text: TokenSource, link: LinkProfile, *, update: Update = Update.ADAMW
) -> Profile:
    """Return a profile of a training, on every process that takes part in it.

    Args:
        arguments: The training. Needs its process groups; with offload or without makes no difference, but for the minimum
            size of what leaves.
        text: What it is trained on.
        link: Of this process.
        update: What steps do with their gradients.

    Raises:
        ConfigError: The arguments ask for what this version or machine does not have.
        IntegrationError: The model cannot be measured as it is.
    """
    numel = arguments.offload.min_offloaded_tensor_size if arguments.offload is not None else DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    # For its sites in all layers. Nothing leaves, since nobody plans.
    config = OffloadConfig(offload_modules=(AUTO,), offload_memory_budget_bytes=TIB, min_offloaded_tensor_size=numel)
    # As trainings run: deterministic kernels take longer, and some save other tensors.
    policy = TrainingPolicy(kernels=Kernels.FASTEST, update=update)
    with contextlib.closing(Trainer(arguments, text, offload=config, policy=policy)) as trainer:
        measurement = StepMeasurement(trainer.integration.engine.device, min_offloaded_numel=numel)
        trainer.integration.measurement = measurement
        with contextlib.closing(measurement):
            trainer.run_step(with_digests=False)
            measurement.request()
            trainer.run_step(with_digests=False)
            ranks = gather(measurement.take_profile())
    return dataclasses.replace(_make_profile(link, merge_processes(ranks)), has_optimizer=update is not Update.NONE)


def gather(profile: RankProfile) -> list[RankProfile]:
    """Return the profiles of all processes, in their order, on each of them."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [profile]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, profile)
    return found


def _make_profile(link: LinkProfile, ranks: tuple[RankProfile, ...]) -> Profile:
    versions = {"torch": str(torch.__version__)}
    if ranks:
        versions["megatron-core"] = str(load_module("megatron.core").__version__)
    return Profile(
        device="CPU" if needs_cpu_support() else torch.cuda.get_device_name(),
        versions=versions,
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        link=link,
        ranks=ranks,
    )
