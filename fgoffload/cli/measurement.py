"""Runs a training step by step and measures the last one. Imports torch: only a command that trains imports this."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from fgoffload.cli.comparison import MemorySample, RunRecord, StepRecord, TagTransfer, Transfers
from fgoffload.cli.report import Setting
from fgoffload.config import OffloadConfig
from fgoffload.engine import ActivationLedger
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.data import TextData
from fgoffload.integrations.megatron.training import StepResult, Trainer
from fgoffload.integrations.megatron.training_arguments import TrainingArguments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained: the same each time, seed and data included."""

    arguments: TrainingArguments
    text: TextData
    """What it is trained on."""
    steps: int
    """Optimizer steps, at least 1."""


def load_training(flags: Sequence[str], *, source: str, data: Path | None, steps: int | None) -> Training:
    """Return the training that `flags` describe.

    Args:
        flags: Megatron's, those of the file before those of the command line.
        source: Where they came from, for errors.
        data: A text, or a folder of them; None takes Python's standard library.
        steps: How many, or None for what the flags say.

    Raises:
        ConfigError: A flag or the text cannot be what it is.
    """
    arguments = parse_arguments(flags, source=source, world_size=1)
    if steps is not None:
        arguments = dataclasses.replace(arguments, train_iters=steps)
    text = TextData.load(data)
    text.check_length(arguments.seq_length)
    return Training(arguments=arguments, text=text, steps=arguments.train_iters)


@contextlib.contextmanager
def process_groups(training: Training) -> Iterator[None]:
    """Hold the process groups that Megatron-Core asks for, until the body ends."""
    Trainer.initialize_parallel(training.arguments)
    try:
        yield
    finally:
        Trainer.destroy_parallel()


def describe_setting(training: Training) -> Setting:
    """Return what the table and the plot say about `training`."""
    return Setting(
        arguments_file=training.arguments.source,
        layers=training.arguments.transformer["num_layers"],
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        versions=f"torch {torch.__version__}, megatron-core {metadata.version('megatron-core')}",
        offload=training.arguments.offload,
    )


def measure_training(training: Training, offload: OffloadConfig | None, *, on_step: Callable[[float], None]) -> RunRecord:
    """Train and return what was computed and measured.

    Activation bytes are counted in the last step only, since counting slows it.

    Args:
        training: What to train. Needs `process_groups`. Its model is built anew, and gone when this function returns or raises.
        offload: The options, or None to train without offload.
        on_step: Called after every step with its mean loss.
    """
    with contextlib.closing(Trainer(training.arguments, training.text, offload=offload)) as trainer:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        records = []
        for _ in range(training.steps - 1):
            records.append(_read_step(trainer.run_step()))
            on_step(records[-1].loss)
        ledger = ActivationLedger(parameters=trainer.parameters())
        with _observe(trainer, ledger), ledger.watch():
            records.append(_read_step(trainer.run_step()))
        on_step(records[-1].loss)
        return RunRecord(
            steps=tuple(records),
            activation_peak_bytes=ledger.peak_bytes,
            samples=tuple(MemorySample(sample.position, sample.resident_bytes) for sample in ledger.samples),
            allocator_peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            transfers=_read_transfers(trainer),
        )


@contextlib.contextmanager
def _observe(trainer: Trainer, ledger: ActivationLedger) -> Iterator[None]:
    if trainer.integration is None:
        yield
        return
    with trainer.integration.engine.observe(ledger):
        yield


def _read_step(result: StepResult) -> StepRecord:
    return StepRecord(losses=tuple(result.losses), gradient_digests=dict(result.gradient_digests), seconds=result.seconds)


def _read_transfers(trainer: Trainer) -> Transfers | None:
    if trainer.integration is None:
        return None
    stats = trainer.integration.last_step
    return Transfers(
        tags={
            name: TagTransfer(d2h_bytes=tag.d2h_bytes, h2d_bytes=tag.h2d_bytes, kept_bytes=dict(tag.kept_bytes))
            for name, tag in stats.tags.items()
        },
        host_peak_bytes=stats.host_peak_bytes,
        prefetch_misses=stats.prefetch_misses,
        window_waits=stats.window_waits,
    )
