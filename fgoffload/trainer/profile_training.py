"""Profiles a training run: times baseline steps, measures one step in detail and, on a GPU, times steps with plans."""

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
from fgoffload.engine import find_device
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.link import measure_link
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.step_measurement import StepMeasurement
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile, merge_processes
from fgoffload.trainer.compared_steps import compare_steps
from fgoffload.trainer.data import TokenSource
from fgoffload.trainer.parallel import name_device
from fgoffload.trainer.trainer import Trainer, TrainingPolicy
from fgoffload.trainer.training_arguments import TrainingArguments
from fgoffload.units import TIB

logger = logging.getLogger(__name__)

PLAIN_STEPS = 3
"""Number of timed baseline steps without offload or profiling. They follow one warm-up step."""


def profile_link() -> Profile:
    """Measure the link between host and device, and return a profile that contains only the link."""
    return _make_profile(measure_link(find_device("cpu" if needs_cpu_support() else "cuda")), ())


def profile_training(
    arguments: TrainingArguments, text: TokenSource, *, has_optimizer: bool = True, on_step: Callable[[], None] = lambda: None
) -> Profile:
    """Profile a training run. All processes of the run must call this, and each gets the same profile.

    Of the offload options, only the minimum tensor size and the host budget are used. `on_step` is called after each step
    except the baseline steps at the beginning, which are not profiled.

    Raises:
        ConfigError: This version or machine does not support the arguments.
        IntegrationError: The model cannot be profiled.
    """
    if arguments.captures_graphs:
        logger.warning(
            "profiling ignores --cuda-graph-impl %s, because replayed graphs cannot be measured.", arguments.cuda_graph_impl
        )
        arguments = arguments.without_graphs()
    link = profile_link().link
    # Deterministic kernels are slower, and some save different tensors for backward.
    policy = TrainingPolicy(is_deterministic=False, has_optimizer=has_optimizer)
    plain_step_s = max(gather(_time_plain_step(arguments, text, policy)))
    config = _choose_offload(arguments.offload)
    with contextlib.closing(Trainer(arguments, text, offload=config, policy=policy)) as trainer:
        engine = trainer.integration.engine
        measurement = StepMeasurement(
            engine.device, min_offloaded_numel=config.min_offloaded_tensor_size, use_plan=trainer.integration.actions.use_plan
        )
        trainer.integration.measurement = measurement
        with contextlib.closing(measurement):
            profile = dataclasses.replace(
                _make_profile(link, _measure_ranks(trainer, measurement, on_step)),
                has_optimizer=has_optimizer,
                plain_step_s=plain_step_s,
            )
            # Step times are not comparable if the batch grows or sequence lengths vary.
            if engine.device.type != "cpu" and arguments.rampup_batch_size is None and not arguments.has_variable_lengths:
                profile = _add_compared_steps(trainer, measurement, profile, on_step)
    return profile


def _choose_offload(offload: OffloadConfig | None) -> OffloadConfig:
    """Return options that create sites for all tags in all layers."""
    return OffloadConfig(
        offload_modules=(AUTO,),
        offload_memory_budget_bytes=TIB,
        offload_host_budget_bytes=None if offload is None else offload.offload_host_budget_bytes,
        min_offloaded_tensor_size=DEFAULT_MIN_OFFLOADED_TENSOR_SIZE if offload is None else offload.min_offloaded_tensor_size,
    )


def _measure_ranks(trainer: Trainer, measurement: StepMeasurement, on_step: Callable[[], None]) -> tuple[RankProfile, ...]:
    """Measure the second step of `trainer`, and return the profiles of all ranks."""
    trainer.run_step(with_digests=False)
    on_step()
    measurement.request()
    trainer.run_step(with_digests=False)
    on_step()
    return merge_processes(gather(measurement.take_profile()))


def _add_compared_steps(
    trainer: Trainer, measurement: StepMeasurement, profile: Profile, on_step: Callable[[], None]
) -> Profile:
    """Add the times of steps with plans to `profile`. Average the baseline step times of the plain and profiled models."""
    host_bytes = min(gather(trainer.integration.engine.arena.budget_bytes))
    steps = compare_steps(trainer, measurement, profile, host_budget_bytes=host_bytes, on_step=on_step)
    if steps and profile.plain_step_s is not None:
        # Two instances of the same model differ in step time, by 2 to 3% if launch-bound.
        seconds = statistics.fmean([profile.plain_step_s, steps[0].keeping_step_s])
        profile = dataclasses.replace(profile, plain_step_s=seconds)
    return dataclasses.replace(profile, compared_steps=steps)


def _time_plain_step(arguments: TrainingArguments, text: TokenSource, policy: TrainingPolicy) -> float:
    """Return the median time in seconds of steps without offload or profiling, and free their model."""
    with contextlib.closing(Trainer(arguments, text, offload=None, policy=policy)) as trainer:
        trainer.run_step(with_digests=False)
        seconds = [trainer.run_step(with_digests=False).seconds for _ in range(PLAIN_STEPS)]
    del trainer
    # The measured step must not count this model as static memory.
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
