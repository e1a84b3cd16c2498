"""Runs a training step by step and measures the last one. Imports torch: only a command that trains imports this."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from fgoffload.benchmark.steps import StepRecord
from fgoffload.cli.comparison import MemorySample, RunRecord, TagTransfer, Transfers, merge_ranks
from fgoffload.cli.errors import TRACEBACK_VARIABLE
from fgoffload.cli.launch import Launch
from fgoffload.cli.report import Setting
from fgoffload.config import OffloadConfig
from fgoffload.engine import ActivationLedger
from fgoffload.engine.host_memory import get_default_budget_bytes
from fgoffload.errors import InternalError, OffloadError
from fgoffload.integrations.megatron.adapter.collectives import gather
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.device_memory import check_static, count_parameter_bytes
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.limits import refuse_what_is_not_built
from fgoffload.trainer.parallel import join_processes, name_device
from fgoffload.trainer.plan_check import check_plan_file
from fgoffload.trainer.trainer import StepResult, Trainer
from fgoffload.trainer.training_arguments import TrainingArguments

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained: the same each time, seed and data included."""

    arguments_file: str
    """As the user named it."""
    arguments: TrainingArguments
    text: TextData
    """What it is trained on."""
    steps: int
    """Optimizer steps, at least 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSource:
    """What a training is loaded from."""

    arguments_file: str
    """As the user named it, for errors."""
    file_flags: Sequence[str]
    """Megatron's flags in that file."""
    typed_flags: Sequence[str]
    """Megatron's flags on the command line; they win."""
    own_flags: Sequence[str]
    """The flags of the command itself, to be suggested for one typed wrongly."""
    data: Path | None
    """A text, or a folder of them; None takes Python's standard library."""
    steps: int | None
    """How many, or None for what the flags say."""
    world_size: int = 1
    """Processes that were started."""


def load_training(source: TrainingSource) -> Training:
    """Return the training that `source` describes, with everything checked that can be before a model is built.

    Raises:
        ConfigError: A flag or the text cannot be what it is.
        PlanError: The plan file cannot be read, or is of another training.
    """
    arguments = parse_arguments(
        source.file_flags,
        source=source.arguments_file,
        world_size=source.world_size,
        typed=source.typed_flags,
        known_elsewhere=source.own_flags,
    )
    refuse_what_is_not_built(arguments)
    if source.steps is not None:
        arguments = dataclasses.replace(arguments, train_iters=source.steps)
    # What the second training needs is checked here too: a fault found there would cost the whole first one.
    for offload in (None, arguments.offload):
        config = build_transformer_config(arguments, offload=offload)
    if arguments.offload is not None:
        if arguments.offload.offload_plan is not None:
            check_plan_file(arguments.offload.offload_plan, arguments, config)
        if arguments.offload.offload_host_budget_bytes is None:
            get_default_budget_bytes()  # which raises where the launcher's variables are no numbers
    if arguments.train_iters <= arguments.steps_until_replay:
        _logger.warning(
            "--cuda-graph-impl %s: none of the %d steps only replays graphs, since the first %d are eager or capture. "
            "Train for more steps.",
            arguments.cuda_graph_impl,
            arguments.train_iters,
            arguments.steps_until_replay,
        )
    text = TextData.load(source.data)
    text.check_length(arguments.seq_length)
    return Training(arguments_file=source.arguments_file, arguments=arguments, text=text, steps=arguments.train_iters)


@contextlib.contextmanager
def process_groups(training: Training, launch: Launch) -> Iterator[None]:
    """Hold the process groups that Megatron-Core asks for, until the body ends.

    Raises:
        ConfigError: The processes of `launch` cannot meet, or one has no GPU.
    """
    if launch.world_size > 1:
        join_processes(rank=launch.rank, world_size=launch.world_size, local_rank=launch.local_rank)
    Trainer.initialize_parallel(training.arguments)
    try:
        yield
    finally:
        Trainer.destroy_parallel()


def describe_setting(training: Training) -> Setting:
    """Return what the table and the plot say about `training`."""
    device, ranks = name_device(), training.arguments.world_size
    return Setting(
        arguments_file=training.arguments_file,
        layers=training.arguments.transformer["num_layers"],
        device=device if ranks == 1 else f"{ranks} x {device}",
        versions=f"torch {torch.__version__}, megatron-core {load_module('megatron.core').__version__}",
        offload=training.arguments.offload,
    )


def measure_training(training: Training, offload: OffloadConfig | None, *, on_step: Callable[[float], None]) -> RunRecord:
    """Train and return what was computed and measured, on all ranks together.

    Activation bytes are counted in one step only, since counting slows it: in the last one that autograd runs itself.

    Args:
        training: What to train. Needs `process_groups`. Its model is built anew, and gone when this function returns or raises.
        offload: The options, or None to train without offload.
        on_step: Called after every step with its mean loss over all ranks.

    Raises:
        ConfigError: Megatron-Core refused the arguments while the model was built or in the first step.
        PlanError: The memory budget is below what the model takes before a step.
        InternalError: It did so with offload alone.
    """
    with _explain_refusal(training, offload, "while the model was built"):
        trainer = Trainer(training.arguments, training.text, offload=offload)
    with contextlib.closing(trainer):
        _check_budget(training, trainer)
        ledger = ActivationLedger(parameters=trainer.parameters())
        records = []
        for number in range(1, training.steps + 1):
            if number in (1, training.arguments.steps_until_replay + 1) and not needs_cpu_support():
                # Where graphs only replay from here on, eager steps and their capture took memory that no later one takes.
                torch.cuda.reset_peak_memory_stats()
            with contextlib.ExitStack() as around:
                if number <= training.arguments.steps_until_replay + 1:
                    when = "in the first step" if number == 1 else f"in step {number}, before CUDA graphs only replay"
                    around.enter_context(_explain_refusal(training, offload, when))
                if number == _find_counted_step(training):
                    around.enter_context(trainer.observe(ledger))
                records.append(_read_step(trainer.run_step()))
            on_step(_average_loss(records[-1]))
        peak = ledger.find_peak()
        record = RunRecord(
            steps=tuple(records),
            activation_peak_bytes=ledger.peak_bytes,
            activation_peak_place="" if peak is None else peak.place,
            samples=tuple(MemorySample(sample.position, sample.resident_bytes) for sample in ledger.samples),
            allocator_peak_bytes=None if needs_cpu_support() else torch.cuda.max_memory_allocated(),
            transfers=_read_transfers(trainer),
        )
        return merge_ranks(gather(record))  # on every rank, so that all end with the same exit code


def _find_counted_step(training: Training) -> int:
    """Return the step, from 1, whose activation bytes are counted: where graphs replay, nobody sees what they save."""
    if not training.arguments.captures_graphs:
        return training.steps
    return max(1, min(training.steps, training.arguments.cuda_graph_warmup_steps))


def _check_budget(training: Training, trainer: Trainer) -> None:
    """Refuse a budget for which no plan will be found, before the first training and not behind it."""
    budget_bytes = None if training.arguments.offload is None else training.arguments.offload.offload_memory_budget_bytes
    if budget_bytes is not None:
        check_static(count_parameter_bytes(trainer.chunks), budget_bytes=budget_bytes)


def _average_loss(step: StepRecord) -> float:
    """Return the mean loss of a step over all ranks: where there is a pipeline, only its last stage has one."""
    if torch.distributed.get_world_size() == 1:
        return step.loss
    device = torch.device("cpu") if needs_cpu_support() else torch.device("cuda", torch.cuda.current_device())
    sums = torch.tensor([sum(step.losses), len(step.losses)], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums)
    total, count = sums.tolist()
    return float(total / count)


@contextlib.contextmanager
def _explain_refusal(training: Training, offload: OffloadConfig | None, when: str) -> Iterator[None]:
    """Turn what Megatron-Core raises over arguments that no check of ours knows into an error of one line.

    Only for building and the first step, which run every layer once, and for steps up to the first replay of CUDA graphs: what
    a later step raises is no matter of arguments.
    """
    try:
        yield
    except (OffloadError, BrokenPipeError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".rstrip(". ")
        see = f"Set {TRACEBACK_VARIABLE}=1 to see the traceback"
        if offload is None:
            raise training.arguments.source.refuse(
                f"Megatron-Core refused these arguments {when}: {text}. Change the flags that this names. {see}."
            ) from error
        raise InternalError(
            f"{training.arguments.source}: offload failed {when}, and without offload the same arguments trained: {text}. "
            f"{see}, and report it with the argument file."
        ) from error


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
