"""Trains and measures one setting at a time on all ranks. Loads torch.

All settings use the same model, seed, tokens and kernels. Between settings, the model and the allocators' caches are freed.
"""

import contextlib
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fgoffload.benchmark.job import Job, make_file_name
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.measurement import Measurement, Run, merge_ranks
from fgoffload.benchmark.rank_models import (
    ANY_OF_OURS,
    TryPlan,
    build_profile_ranks,
    build_table_ranks,
    load_profile,
    plan_budget,
)
from fgoffload.benchmark.settings import BASELINE, OWN_HOOKS, Setting, System
from fgoffload.benchmark.traces import write_trace
from fgoffload.engine import ActivationLedger
from fgoffload.engine.torch_internals import empty_host_cache
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.hardware import find_hardware
from fgoffload.planner.timing.profile import MeasuredTraining
from fgoffload.trainer import parallel
from fgoffload.trainer.compared_steps import settle
from fgoffload.trainer.data import RandomTokens
from fgoffload.trainer.profile_training import profile_training
from fgoffload.trainer.steps import StepResult, merge_steps
from fgoffload.trainer.trainer import Trainer, TrainingPolicy

OnStep = Callable[[float | None], None]
"""Called with the mean loss of each step, or with None while a profile is measured or a plan is tried."""

_TRIED_STEPS = 4
"""Number of measured steps in a plan's trial run, after one warm-up step or, with graphs, the first replay."""


class Runner:
    """Measures the settings of one job. All ranks must call its methods together."""

    def __init__(self, job: Job, on_step: OnStep) -> None:
        self._job = job
        self._on_step = on_step
        self._tokens = RandomTokens(vocab_size=parse_setting_arguments(job, BASELINE).vocab_size, device=parallel.get_device())
        self._ranks: Sequence[RankModel] = ()
        self._planned: dict[Setting, Setting] = {}
        """Maps each setting with a budget to the same setting with its plan."""

    def measure_times(self, run: Run) -> Measurement:
        """Return step times and memory of a setting, merged over all ranks."""
        setting = self._plan(run.setting, self._try_plan)
        with self.train(setting, has_optimizer=self._job.has_optimizer) as trainer, disable_collector():
            for _ in range(self._job.warmup_steps):
                self._run_step(trainer)
            reset_peaks()
            seconds = tuple(self._run_step(trainer).seconds for _ in range(self._job.steps))
            measurement = _read_measurement(trainer, seconds)
            if needs_cpu_support() and setting.system not in OWN_HOOKS:
                measurement = _add_activation_peak(measurement, trainer)
            if self._job.writes_traces and run.repeat == 0:
                # Every rank writes a trace, since the trace of one rank can show why another rank waits.
                rank = torch.distributed.get_rank()
                name = f"trace_{make_file_name(run.setting.name)}{f'_rank{rank}' if rank else ''}.json.gz"
                write_trace(functools.partial(trainer.run_step, with_digests=False), self._job.folder / name)
        return merge_ranks(gather(measurement))

    def record_bits(self, setting: Setting) -> tuple[StepResult, ...]:
        """Train a setting with deterministic kernels, and return the result of each step, merged over all ranks."""
        # Plans are not tried, since deterministic kernels need temporary memory that the budget does not cover.
        with self.train(self._plan(setting, None), is_deterministic=True) as trainer:
            steps = [self._run_step(trainer, with_digests=True) for _ in range(self._job.steps_of_run)]
        return tuple(merge_steps(ranks) for ranks in zip(*gather(steps), strict=True))

    def measure_profile(self) -> None:
        """Profile the training run. Rank 0 writes the profile."""
        empty_caches()
        with disable_collector():
            arguments = parse_setting_arguments(self._job, ANY_OF_OURS)
            has_optimizer = self._job.has_optimizer
            profile = profile_training(
                arguments, self._tokens, has_optimizer=has_optimizer, on_step=lambda: self._on_step(None)
            )
        empty_caches()
        if torch.distributed.get_rank() == 0 and self._job.profile is not None:
            flags = (*self._job.file_flags, *self._job.typed_flags)
            size = torch.distributed.get_world_size()
            training = MeasuredTraining(source=self._job.source, flags=flags, world_size=size)
            dataclasses.replace(profile, training=training).save(self._job.profile)

    @contextlib.contextmanager
    def train(self, setting: Setting, *, is_deterministic: bool = False, has_optimizer: bool = False) -> Iterator[Trainer]:
        """Yield a trainer for a setting, and free it on exit."""
        arguments = parse_setting_arguments(self._job, setting)
        empty_caches()
        policy = TrainingPolicy(
            is_deterministic=is_deterministic,
            has_optimizer=has_optimizer,
            uses_megatrons_engine=setting.system is System.MEGATRON,
        )
        with contextlib.closing(Trainer(arguments, self._tokens, offload=arguments.offload, policy=policy)) as trainer:
            if setting.system is System.SAVE_ON_CPU:
                save_on_cpu(trainer.chunks)
            yield trainer
        empty_caches()

    def _plan(self, setting: Setting, try_plan: TryPlan | None) -> Setting:
        """Return `setting`, with a plan if it has a budget. Plans are cached."""
        if setting.budget_bytes is None:
            return setting
        if setting not in self._planned:
            self._ranks = self._ranks or self._build_ranks()
            path = self._job.find_plan_path(setting, rank=torch.distributed.get_rank())
            self._planned[setting] = plan_budget(setting, self._ranks, path, try_plan)
        return self._planned[setting]

    def _try_plan(self, setting: Setting) -> int | None:
        """Train for a few steps, and return the peak bytes of the rank with the highest peak; None on a CPU."""
        if needs_cpu_support():
            return None
        with self.train(setting, has_optimizer=self._job.has_optimizer) as trainer, disable_collector():
            try:
                for number in range(1 + self._job.steps_until_replay + _TRIED_STEPS):
                    if number == 1 + self._job.steps_until_replay:
                        reset_peaks()
                    settle()
                    trainer.run_step(with_digests=False)
                    self._on_step(None)
                return max(gather(torch.cuda.max_memory_allocated()))
            except torch.OutOfMemoryError:
                if torch.distributed.get_world_size() > 1:
                    raise  # cannot continue, since the other ranks are in the middle of a step
                return torch.cuda.mem_get_info()[1]

    def _build_ranks(self) -> Sequence[RankModel]:
        """Return the planner's model of the training run, from the profile or else the hardware table."""
        device = parallel.name_device()
        if (profile := load_profile(self._job, device)) is not None:
            return build_profile_ranks(self._job, profile)
        return build_table_ranks(self._job, find_hardware(device))

    def _run_step(self, trainer: Trainer, *, with_digests: bool = False) -> StepResult:
        settle()
        result = trainer.run_step(with_digests=with_digests)
        self._on_step(result.loss)
        return result


def save_on_cpu(chunks: Sequence[torch.nn.Module]) -> None:
    """Wrap each chunk's forward in PyTorch's `save_on_cpu`."""
    for chunk in chunks:
        original = chunk.forward

        def forward(self: torch.nn.Module, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return original(*args, **kwargs)

        chunk.forward = types.MethodType(forward, chunk)


@contextlib.contextmanager
def disable_collector() -> Iterator[None]:
    """Disable garbage collection during the body. One collection takes as long as a layer, so it would distort step times."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def empty_caches() -> None:
    """Collect garbage and release the cached memory of the device and host allocators."""
    gc.collect()
    if not needs_cpu_support():
        torch.cuda.empty_cache()
        empty_host_cache()


def reset_peaks() -> None:
    """Reset the peak statistics of the device allocator."""
    if not needs_cpu_support():
        torch.cuda.reset_peak_memory_stats()


def find_peak() -> int | None:
    """Return the peak bytes of tensors since `reset_peaks`; None on a CPU."""
    return None if needs_cpu_support() else torch.cuda.max_memory_allocated()


def _read_measurement(trainer: Trainer, seconds: tuple[float, ...]) -> Measurement:
    stats = None if trainer.integration is None else trainer.integration.last_step
    memory: dict[str, int | None] = {}
    if not needs_cpu_support():
        # Pinned memory of torch's allocator, whose cache was emptied before this setting. Our engine's arena is added below.
        host = torch.cuda.host_memory_stats()
        memory = {
            "peak_allocated_bytes": find_peak(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "host_bytes": int(max(host.get("allocated_bytes.current", 0), host.get("reserved_bytes.current", 0))),
        }
    if stats is not None:
        memory |= {
            "host_bytes": (memory.get("host_bytes") or 0) + stats.host_reserved_bytes,
            "d2h_bytes": stats.d2h_bytes,
            "prefetch_misses": stats.prefetch_misses,
            "window_waits": stats.window_waits,
        }
    return Measurement(step_seconds=seconds, **memory)


def _add_activation_peak(measurement: Measurement, trainer: Trainer) -> Measurement:
    """Add the activation peak to `measurement`. This runs another step, since counting slows a step down."""
    ledger = ActivationLedger(parameters=trainer.parameters())
    with trainer.observe(ledger):
        trainer.run_step(with_digests=False)
    return dataclasses.replace(measurement, activation_peak_bytes=ledger.peak_bytes)
