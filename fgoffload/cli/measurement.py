"""Trains step by step, and measures time and memory. Only commands that train import this module, since it imports torch."""

import contextlib
import dataclasses
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fgoffload.cli.comparison import RunRecord, merge_ranks
from fgoffload.cli.errors import TRACEBACK_VARIABLE
from fgoffload.cli.launch import Launch
from fgoffload.config import OffloadConfig
from fgoffload.engine import ActivationLedger
from fgoffload.engine.host_budget import get_default_budget_bytes
from fgoffload.errors import InternalError, OffloadError
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.patching.cpu_support import needs_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.profile.device_memory import check_static, count_parameter_bytes
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.limits import check_plan_file, check_supported
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel, join_processes, name_device
from fgoffload.trainer.trainer import Trainer
from fgoffload.trainer.training_arguments import TrainingArguments

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Setup of the training runs to compare or profile, including seed and data."""

    arguments: TrainingArguments
    text: TextData
    flags: tuple[str, ...]
    """Megatron's flags: those in the file, then those on the command line."""


def load_training(
    path: Path,
    typed: Sequence[str] = (),
    *,
    own_flags: Iterable[str] = (),
    data: str | None = None,
    steps: int | None = None,
    world_size: int = 1,
) -> Training:
    """Read the flags and the text, and check both before the model is built.

    Megatron's flags in `typed` override the argument file at `path`. Errors can suggest `own_flags`, the command's flags. If
    `data` is None, the text is Python's standard library. If `steps` is None, the flags set the number of steps.
    """
    flags = read_argument_file(path, variables=os.environ)
    arguments = parse_arguments(flags, source=str(path), world_size=world_size, typed=typed, known_elsewhere=tuple(own_flags))
    check_supported(arguments)
    if steps is not None:
        arguments = dataclasses.replace(arguments, train_iters=steps)
    # Check the setup with offload too. Otherwise, its errors would appear only after the whole first run.
    for offload in (None, arguments.offload):
        config = build_transformer_config(arguments, offload=offload)
    if arguments.offload is not None:
        if arguments.offload.offload_plan is not None:
            check_plan_file(arguments.offload.offload_plan, arguments, config)
        if arguments.offload.offload_host_budget_bytes is None:
            get_default_budget_bytes()  # raises if the launcher's variables are not numbers
    if arguments.train_iters <= arguments.steps_until_replay:
        _logger.warning(
            "--cuda-graph-impl %s: none of the %d steps replays graphs, since the first %d run eagerly or capture graphs. "
            "Train for more steps.",
            arguments.cuda_graph_impl,
            arguments.train_iters,
            arguments.steps_until_replay,
        )
    text = TextData.load(None if data is None else Path(data).expanduser())
    text.check_length(arguments.seq_length)
    return Training(arguments=arguments, text=text, flags=(*flags, *typed))


@contextlib.contextmanager
def process_groups(arguments: TrainingArguments, launch: Launch) -> Iterator[None]:
    """Create Megatron-Core's process groups, and destroy them when the body ends."""
    if launch.world_size > 1:
        join_processes(rank=launch.rank, world_size=launch.world_size, local_rank=launch.local_rank)
    initialize_parallel(arguments)
    try:
        yield
    finally:
        destroy_parallel()


def describe_training(arguments: TrainingArguments) -> str:
    """Return the title of a run's table and plot: its file, layers, devices and package versions."""
    devices, layers = f"{arguments.world_size} x {name_device()}", arguments.transformer["num_layers"]
    versions = f"torch {torch.__version__}, megatron-core {load_module('megatron.core').__version__}"
    return f"{arguments.source.places[0]}: {layers} {'layer' if layers == 1 else 'layers'} on {devices}\n{versions}"


def measure_training(training: Training, offload: OffloadConfig | None, *, on_step: Callable[[float], None]) -> RunRecord:
    """Train within `process_groups`, and return the merged record of all ranks. If `offload` is None, nothing is offloaded.

    Counting activation bytes slows a step, so they are counted in only one step, the last one that runs eagerly. `on_step` is
    called after every step with its mean loss over all ranks.

    Raises:
        ConfigError: Megatron-Core rejected the arguments while the model was built or in the first step.
        PlanError: The memory budget is below the static memory.
        InternalError: The run with offload failed, although the run without offload worked.
    """
    with _explain_rejection(training, offload, "while the model was built"):
        trainer = Trainer(training.arguments, training.text, offload=offload)
    with contextlib.closing(trainer):
        configured = training.arguments.offload  # check before the first run, which does not offload
        if configured is not None and configured.offload_memory_budget_bytes is not None:
            check_static(count_parameter_bytes(trainer.chunks), budget_bytes=configured.offload_memory_budget_bytes)
        ledger = ActivationLedger(parameters=trainer.parameters())
        records = []
        for number in range(1, training.arguments.train_iters + 1):
            if number in (1, training.arguments.steps_until_replay + 1) and not needs_cpu_support():
                # Exclude the peaks of building the model and, with graphs, of the eager and capture steps.
                torch.cuda.reset_peak_memory_stats()
            with contextlib.ExitStack() as around:
                if number <= training.arguments.steps_until_replay + 1:
                    when = "in the first step" if number == 1 else f"in step {number}, before CUDA graphs are replayed"
                    around.enter_context(_explain_rejection(training, offload, when))
                if number == _find_counted_step(training):
                    around.enter_context(trainer.observe(ledger))
                records.append(trainer.run_step())
            # In a pipeline, only the last stage has losses.
            on_step(statistics.fmean(loss for own in gather(records[-1].losses) for loss in own))
        peak = ledger.find_peak()
        record = RunRecord(
            steps=tuple(records),
            counted_step=_find_counted_step(training),
            activation_peak_bytes=ledger.peak_bytes,
            activation_peak_place="" if peak is None else peak.place,
            samples=tuple(ledger.samples),
            allocator_peak_bytes=None if needs_cpu_support() else torch.cuda.max_memory_allocated(),
            stats=None if trainer.integration is None else trainer.integration.last_step,
        )
        return merge_ranks(gather(record))  # on every rank, so that all return the same exit code


def _find_counted_step(training: Training) -> int:
    """Return the 1-based number of the step whose activation bytes are counted. Replayed graphs hide saved tensors."""
    if not training.arguments.captures_graphs:
        return training.arguments.train_iters
    return max(1, min(training.arguments.train_iters, training.arguments.cuda_graph_warmup_steps))


@contextlib.contextmanager
def _explain_rejection(training: Training, offload: OffloadConfig | None, when: str) -> Iterator[None]:
    """Turn exceptions that Megatron-Core raises for its arguments into one-line errors.

    Megatron-Core raises them while the model is built and in the first step or, with CUDA graphs, until the first replay.
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
                f"Megatron-Core rejected these arguments {when}: {text}. Change the flags named in that message. {see}."
            ) from error
        raise InternalError(
            f"{training.arguments.source}: offload failed {when}, but the same arguments work without offload: {text}. "
            f"{see}, and report it with the argument file."
        ) from error
