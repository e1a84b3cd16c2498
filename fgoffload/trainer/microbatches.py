"""Number and contents of a rank's microbatches."""

import math
from collections.abc import Iterator
from typing import Any

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer.data import Batches, Microbatch, TokenSource
from fgoffload.trainer.training_arguments import TrainingArguments

FP8_ROWS = 16
"""Number that must divide the row counts of FP8 matrix products. Source: Transformer Engine."""


def count_microbatches(arguments: TrainingArguments, *, consumed_samples: int) -> int:
    """Return the number of microbatches of this rank in the step after `consumed_samples` sequences.

    Megatron's own calculator ramps up the batch.
    """
    if arguments.rampup_batch_size is None:
        return arguments.num_microbatches
    calculator = _build_calculator(arguments, *arguments.rampup_batch_size)
    calculator.update(consumed_samples, consistency_check=True)
    return int(calculator.get())


def _build_calculator(arguments: TrainingArguments, start: int, increment: int, samples: int) -> Any:
    """Return Megatron's calculator for a batch that grows from `start` by `increment` over `samples` sequences."""
    module = load_module("megatron.core.num_microbatches_calculator")
    common = {
        "micro_batch_size": arguments.micro_batch_size,
        "data_parallel_size": arguments.data_parallel_size,
        "decrease_batch_size_if_needed": False,
        "rank": 1,  # rank 1 logs nothing
    }
    if hasattr(module, "RampupBatchsizeNumMicroBatchesCalculator"):
        return module.RampupBatchsizeNumMicroBatchesCalculator(
            global_batch_size=arguments.global_batch_size,
            start_global_batch_size=start,
            batch_size_increment=increment,
            ramup_samples=samples,
            **common,
        )
    # The development branch takes steps instead, each as `samples:batch`.
    steps = range((arguments.global_batch_size - start) // increment + 1)
    schedule = {math.ceil(step * samples / (len(steps) - 1)): start + step * increment for step in steps}
    return module.StepBatchsizeNumMicroBatchesCalculator(
        schedule=" ".join(f"{threshold}:{size}" for threshold, size in schedule.items()), **common
    )


def iterate_microbatches(
    arguments: TrainingArguments,
    text: TokenSource,
    *,
    step: int,
    count: int,
    data_parallel_rank: int,
    is_evaluation: bool = False,
) -> Iterator[Microbatch]:
    """Yield the microbatches of one step or evaluation: whole sequences, the same on all ranks of a model copy.

    Args:
        arguments: The training.
        text: Source of the tokens.
        step: Number of the step, from 0.
        count: Number of microbatches.
        data_parallel_rank: Data-parallel rank; each copy of the model sees different text.
        is_evaluation: Whether to use text that no training step uses.
    """
    multiple = find_length_multiple(arguments)
    varies = arguments.has_variable_lengths
    batches = Batches(
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        seed=arguments.seed,
        data_parallel_rank=data_parallel_rank,
        shortest=max(multiple, arguments.seq_length // 2) if varies else None,
        length_multiple=multiple,
        split="evaluation" if is_evaluation else "",
    )
    return text.iterate_microbatches(batches, step=step, count=count)


def find_length_multiple(arguments: TrainingArguments) -> int:
    """Return the number that must divide sequence lengths, so that ranks can share a sequence."""
    multiple = arguments.tensor_parallel_size if arguments.transformer.get("sequence_parallel") else 1
    if arguments.context_parallel_size > 1:
        multiple *= 2 * arguments.context_parallel_size
    return math.lcm(multiple, FP8_ROWS * multiple) if arguments.transformer.get("fp8") else multiple
