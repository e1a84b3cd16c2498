"""Output of `fgoffload plan` for a model that does not fit: memory by pipeline rank, and layouts that would fit."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import to_flag
from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.memory.static_memory import count_output_bytes
from fgoffload.planner.model.model_shape import ModelShape, pad_vocab_size
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model.rank_layer import make_layer_shape
from fgoffload.planner.model_ranks import Assumptions, list_rank_memory
from fgoffload.planner.ranks.schedule import PassKind, list_passes
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.units import format_bytes

ReadModel: TypeAlias = Callable[[Sequence[str]], tuple[ModelShape, Parallelism]]
"""Reads a model with additional flags."""
MOST_GPUS = 16384
"""Largest number of GPUs of a suggested layout."""
LONG_SEQUENCE = 16384
"""Sequence length in tokens from which context parallelism is suggested."""
LAYOUTS = 2
"""Number of layouts shown."""
_HIDDEN_BYTES = 2
"""Bytes of an activation element, in bf16."""


class RankFit(NamedTuple):
    """Memory of a pipeline rank."""

    static_bytes: int
    activation_bytes: int
    """Peak activation bytes of a step that keeps everything on the device."""
    recomputed_bytes: int
    """Peak activation bytes under full recompute: the input of each layer, and all of one layer."""
    logits_bytes: int


def list_fits(model: ModelShape, parallelism: Parallelism, assumptions: Assumptions) -> list[RankFit]:
    """Return the memory of each pipeline rank.

    Raises:
        ConfigError: The ranks cannot share the model.
    """
    layer_bytes = {
        number: sum(tensor.size_bytes for tensor in list_saved_tensors(make_layer_shape(model, parallelism, number)))
        for number in model.numbers
    }
    input_bytes = _HIDDEN_BYTES * make_layer_shape(model, parallelism, 0).tokens * model.hidden_size
    output = count_output_bytes(model, parallelism)
    fits = []
    for rank, chunks in enumerate(list_chunks(model, parallelism)):
        kept = [sum(layer_bytes[number] for number in chunk.layers) for chunk in chunks]
        inputs = [input_bytes * len(chunk.layers) for chunk in chunks]
        passes = [(one.kind is PassKind.FORWARD, one.chunk) for one in list_passes(parallelism.pipeline, rank=rank)]
        largest = max((layer_bytes[number] for chunk in chunks for number in chunk.layers), default=0)
        has_output = any(chunk.has_output for chunk in chunks)
        fits.append(
            RankFit(
                static_bytes=list_rank_memory(model, parallelism, rank, assumptions=assumptions).total_bytes,
                activation_bytes=_find_peak(passes, kept),
                recomputed_bytes=_find_peak(passes, inputs) + largest,
                logits_bytes=output.saved_bytes + output.forward_extra_bytes if has_output else 0,
            )
        )
    return fits


def show_fits(
    console: Console, model: ModelShape, parallelism: Parallelism, hardware: Hardware, assumptions: Assumptions
) -> None:
    """Show the memory of each rank."""
    table = Table(title=f"{model.name} on {parallelism.world_size} x {hardware.name}", title_justify="left")
    for name in ("rank", "static", "activations", "under full recompute", "logits", "device"):
        table.add_column(name, justify="right")
    for rank, fit in enumerate(list_fits(model, parallelism, assumptions)):
        table.add_row(str(rank), *map(format_bytes, (*fit, hardware.device_memory_bytes)))
    console.print(table)


def show_layouts(
    console: Console,
    model: ModelShape,
    parallelism: Parallelism,
    hardware: Hardware,
    assumptions: Assumptions,
    read_model: ReadModel,
) -> None:
    """Show layouts that would fit, with the number of GPUs of `parallelism` or more.

    `read_model` reads the model with flags on top of the command's, and raises ConfigError if they do not suit the model.
    """
    shown = 0
    accounts = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    undone = [to_flag(f"no_{name}") for name in accounts if getattr(parallelism, name)]
    for layout in _find_layouts(model, parallelism, hardware, assumptions):
        flags = [*_list_flags(layout), *undone]
        with contextlib.suppress(ConfigError):  # flags of the model's file may exclude the layout
            if _fits(*read_model(flags), hardware, assumptions):
                console.print(f"Would fit: {' '.join(flags)}", soft_wrap=True)
                shown += 1
        if shown == LAYOUTS:
            return
    if not shown:
        console.print(f"No layout of up to {MOST_GPUS} GPUs fits.")


def _fits(model: ModelShape, parallelism: Parallelism, hardware: Hardware, assumptions: Assumptions) -> bool:
    """Return whether every rank fits under full recompute."""
    fits = list_fits(model, parallelism, assumptions)
    return all(one.static_bytes + one.recomputed_bytes + one.logits_bytes <= hardware.device_memory_bytes for one in fits)


def _find_peak(passes: Sequence[tuple[bool, int]], chunk_bytes: Sequence[int]) -> int:
    steps = (chunk_bytes[chunk] if is_forward else -chunk_bytes[chunk] for is_forward, chunk in passes)
    return max(itertools.accumulate(steps), default=0)


def _find_layouts(
    model: ModelShape, parallelism: Parallelism, hardware: Hardware, assumptions: Assumptions
) -> Iterator[Parallelism]:
    """Yield layouts that fit under full recompute: fewest GPUs first, then the smallest parallel sizes."""
    domain = hardware.nvlink_gpus or hardware.gpus_per_node
    experts = 1 if model.experts is None else model.experts.num_experts
    samples = parallelism.microbatches * parallelism.micro_batch_size * parallelism.data_parallel_size
    contexts = (1, 2, 4, 8) if model.seq_length >= LONG_SEQUENCE else (1,)
    sizes = sorted(itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), contexts, (1, 2, 4, 8, 16, 32, 64)), key=sum)
    counts = (parallelism.world_size << doublings for doublings in itertools.count())
    for gpus in itertools.takewhile(lambda gpus: gpus <= MOST_GPUS, counts):
        for tensor, pipeline, context, expert in sizes:
            if gpus % (tensor * pipeline * context) or tensor > domain or experts % expert:
                continue
            # A layout from the model's file requires its number of pipeline ranks.
            if parallelism.pipeline_layout is not None and pipeline != parallelism.pipeline_parallel_size:
                continue
            data = gpus // (tensor * pipeline * context)
            first, last = _split_layers(model, parallelism, pipeline)
            try:
                layout = Parallelism(
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    context_parallel_size=context,
                    expert_parallel_size=expert,
                    data_parallel_size=data,
                    micro_batch_size=parallelism.micro_batch_size,
                    microbatches=max(pipeline, samples // (parallelism.micro_batch_size * data)),
                    has_sequence_parallel=tensor > 1,
                    has_distributed_optimizer=parallelism.has_distributed_optimizer,
                    pipeline_layout=parallelism.pipeline_layout,
                    num_layers_in_first_pipeline_stage=first,
                    num_layers_in_last_pipeline_stage=last,
                )
                padded = pad_vocab_size(model.vocab_size, divisible_by=1, tensor_parallel_size=tensor)
                if _fits(dataclasses.replace(model, vocab_size=padded), layout, hardware, assumptions):
                    yield layout
            except ConfigError:
                continue


def _split_layers(model: ModelShape, parallelism: Parallelism, pipeline: int) -> tuple[int | None, int | None]:
    """Return the layers of the first and the last of `pipeline` stages, if they need flags or the model's file has them."""
    first = -(-model.num_layers // pipeline)
    is_uneven = model.num_layers % pipeline > 0 and parallelism.pipeline_layout is None
    has_first = parallelism.num_layers_in_first_pipeline_stage is not None
    has_last = is_uneven or parallelism.num_layers_in_last_pipeline_stage is not None
    last = model.num_layers - (pipeline - 1) * first
    return first if has_first else None, last if has_last else None


def _list_flags(layout: Parallelism) -> list[str]:
    """Return the flags of a layout, sizes of 1 included: the model's file may have others."""
    sizes = {
        "--num-gpus": layout.world_size,
        "--tp": layout.tensor_parallel_size,
        "--pp": layout.pipeline_parallel_size,
        "--vp": None if layout.pipeline_layout is not None else 1,
        "--cp": layout.context_parallel_size,
        "--ep": layout.expert_parallel_size,
        "--etp": 1,
        "--global-batch-size": layout.microbatches * layout.micro_batch_size * layout.data_parallel_size,
        "--decoder-first-pipeline-num-layers": layout.num_layers_in_first_pipeline_stage,
        "--decoder-last-pipeline-num-layers": layout.num_layers_in_last_pipeline_stage,
    }
    flags = [word for flag, size in sizes.items() if size is not None for word in (flag, str(size))]
    return [*flags, *(["--sequence-parallel"] if layout.tensor_parallel_size > 1 else [])]
