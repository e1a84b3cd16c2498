"""Measures a whole training that `fgoffload train` can run.

It runs a few plain steps, a warm-up step, the step that counts, and on a device that is not its own host steps under plans:
[Note: Which plans are compared] in `compared_steps`.
"""

import contextlib
import dataclasses
import datetime
import gc
import logging
import statistics
from collections.abc import Callable

import torch

from fgoffload.config import AUTO, OffloadConfig
from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.engine import Device, find_device
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.link import measure_link
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.step_measurement import StepMeasurement
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile, merge_processes
from fgoffload.trainer.compared_steps import MOST_COMPARED_STEPS, compare_steps
from fgoffload.trainer.data import TokenSource
from fgoffload.trainer.parallel import name_device
from fgoffload.trainer.trainer import Trainer
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.trainer.training_policy import Kernels, TrainingPolicy, Update
from fgoffload.units import TIB

logger = logging.getLogger(__name__)

PLAIN_STEPS = 3
"""Steps that are timed with nothing measured in them, after one that warms up. The median of three forgives a slow one."""

LONGEST_RUN = max(1 + PLAIN_STEPS, 2 + MOST_COMPARED_STEPS)
"""Steps that one trainer of a profile runs at most."""


def get_training_device() -> Device:
    """Return the device that trainings of this process run on."""
    return find_device("cpu" if needs_cpu_support() else "cuda")


def profile_link(device: Device) -> Profile:
    """Return a profile of the link of `device` alone."""
    return _make_profile(measure_link(device), ())


def profile_training(
    arguments: TrainingArguments,
    text: TokenSource,
    link: LinkProfile,
    *,
    update: Update = Update.ADAMW,
    plain_step_s: float | None = None,
    has_own_host: bool | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Profile:
    """Return a profile of a training, on every process that takes part in it.

    Args:
        arguments: The training. Needs its process groups; with offload or without makes no difference, but for the minimum
            size of what leaves.
        text: What it is trained on.
        link: Of this process.
        update: What steps do with their gradients.
        plain_step_s: Seconds of a step of the same training without offload and with nothing measured in it, where somebody has
            just timed it. None times some first. Where steps are compared, those that keep all count as much.
        has_own_host: Whether the host is not the device, and can be late; None asks the device.
        on_step: Called after each step but the plain ones.

    Raises:
        ConfigError: The arguments ask for what this version or machine does not have.
        IntegrationError: The model cannot be measured as it is.
    """
    if arguments.captures_graphs:
        logger.warning(
            "a profile is measured without --cuda-graph-impl %s: what graphs replay cannot be watched.",
            arguments.cuda_graph_impl,
        )
        arguments, plain_step_s = arguments.without_graphs(), None
    # As trainings run: deterministic kernels take longer, and some save other tensors.
    policy = TrainingPolicy(kernels=Kernels.FASTEST, update=update)
    if plain_step_s is None:
        plain_step_s = max(gather(_time_plain_step(arguments, text, policy)))
    config = _choose_offload(arguments.offload)
    with contextlib.closing(Trainer(arguments, text, offload=config, policy=policy)) as trainer:
        engine = trainer.integration.engine
        measurement = StepMeasurement(
            engine.device, min_offloaded_numel=config.min_offloaded_tensor_size, use_plan=trainer.integration.use_plan
        )
        trainer.integration.measurement = measurement
        with contextlib.closing(measurement):
            profile = dataclasses.replace(
                _make_profile(link, _measure_ranks(trainer, measurement, on_step)),
                has_optimizer=update is not Update.NONE,
                plain_step_s=plain_step_s,
            )
            if has_own_host is None:
                has_own_host = engine.device.type != "cpu"
            # Where the batch grows, or sequences have other lengths in each step, steps differ by that.
            if has_own_host and arguments.rampup_batch_size is None and not arguments.has_variable_lengths:
                profile = _add_compared_steps(trainer, measurement, profile, on_step)
    return profile


def _choose_offload(offload: OffloadConfig | None) -> OffloadConfig:
    """Return what gives all layers their sites. In the step that warms up tags leave, and in the recorded one none does."""
    return OffloadConfig(
        offload_modules=(AUTO,),
        offload_memory_budget_bytes=TIB,
        offload_host_budget_bytes=None if offload is None else offload.offload_host_budget_bytes,
        min_offloaded_tensor_size=DEFAULT_MIN_OFFLOADED_TENSOR_SIZE if offload is None else offload.min_offloaded_tensor_size,
    )


def _measure_ranks(trainer: Trainer, measurement: StepMeasurement, on_step: Callable[[], None]) -> tuple[RankProfile, ...]:
    """Return what the second step of `trainer` ran, on all ranks."""
    trainer.run_step(with_digests=False)
    on_step()
    measurement.request()
    trainer.run_step(with_digests=False)
    on_step()
    return merge_processes(gather(measurement.take_profile()))


def _add_compared_steps(
    trainer: Trainer, measurement: StepMeasurement, profile: Profile, on_step: Callable[[], None]
) -> Profile:
    """Return `profile` with steps under plans, and with the mean of both models' plain steps."""
    host_bytes = min(gather(trainer.integration.engine.arena.budget_bytes))
    steps = compare_steps(trainer, measurement, profile, host_budget_bytes=host_bytes, on_step=on_step)
    if steps and profile.plain_step_s is not None:
        # A model built anew has steps that are longer or shorter as a whole, by 2 to 3% where the host is late
        # (docs/decisions.md): two say more than one. All steps were in turn with the same that keep all.
        seconds = statistics.fmean([profile.plain_step_s, steps[0].keeping_step_s])
        profile = dataclasses.replace(profile, plain_step_s=seconds)
    return dataclasses.replace(profile, compared_steps=steps)


def _time_plain_step(arguments: TrainingArguments, text: TokenSource, policy: TrainingPolicy) -> float:
    """Return the median seconds of a step with everything kept and nothing measured in it, and leave nothing of its model."""
    with contextlib.closing(Trainer(arguments, text, offload=None, policy=policy)) as trainer:
        trainer.run_step(with_digests=False)
        seconds = [trainer.run_step(with_digests=False).seconds for _ in range(PLAIN_STEPS)]
    del trainer
    # A model that waits for the collector would count among what is always on the device in the step that is measured.
    gc.collect()
    if not needs_cpu_support():
        torch.cuda.empty_cache()
    return statistics.median(seconds)


def _make_profile(link: LinkProfile, ranks: tuple[RankProfile, ...]) -> Profile:
    versions = {"torch": str(torch.__version__)}
    if ranks:
        versions["megatron-core"] = str(load_module("megatron.core").__version__)
    return Profile(
        device=name_device(),
        versions=versions,
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        link=link,
        ranks=ranks,
    )
