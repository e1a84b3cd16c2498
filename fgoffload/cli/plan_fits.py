"""For a model that does not fit, shows the memory of each pipeline rank and layouts that would fit."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from rich.console import Console

from fgoffload.cli.console import make_table, show_working
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import to_flag
from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.memory.static_memory import count_output_bytes
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model.rank_layer import make_layer_shape
from fgoffload.planner.model_ranks import Assumptions, list_rank_memory
from fgoffload.planner.ranks.schedule import PassKind, list_passes
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.units import format_bytes

ReadModel: TypeAlias = Callable[[Sequence[str]], tuple[ModelShape, Parallelism]]
"""Function that reads the model with additional flags."""
MOST_GPUS = 16384
"""Maximum number of GPUs in a suggested layout."""
LONG_SEQUENCE = 16384
"""Minimum sequence length in tokens for which context parallelism is suggested."""
LAYOUTS = 2
_HIDDEN_BYTES = 2
"""Bytes per activation element, in bf16."""


class RankFit(NamedTuple):
    """Memory of a pipeline rank."""

    static_bytes: int
    activation_bytes: int
    """Peak activation bytes if everything stays on the device."""
    recomputed_bytes: int
    """Peak activation bytes under full recompute: the inputs of all layers, and all activations of one layer."""
    logits_bytes: int


def list_fits(model: ModelShape, parallelism: Parallelism, assumptions: Assumptions) -> list[RankFit]:
    """Return the memory of each pipeline rank.

    Raises:
        ConfigError: The parallel sizes are invalid for the model.
    """
    layer_bytes = {
        number: sum(tensor.size_bytes for tensor in list_saved_tensors(make_layer_shape(model, parallelism, number)))
        for number in model.numbers
    }
    input_bytes = _HIDDEN_BYTES * make_layer_shape(model, parallelism, 0).tokens * model.hidden_size
    output = count_output_bytes(model, parallelism)
    pipeline = parallelism.pipeline.shorten()
    fits = []
    for rank, chunks in enumerate(list_chunks(model, parallelism)):
        kept = [sum(layer_bytes[number] for number in chunk.layers) for chunk in chunks]
        inputs = [input_bytes * len(chunk.layers) for chunk in chunks]
        passes = [(one.kind is PassKind.FORWARD, one.chunk) for one in list_passes(pipeline, rank=rank)]
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
    """Print a table of the memory of each pipeline rank."""
    headings = ("rank", "static", "activations", "under full recompute", "logits", "device")
    table = make_table(
        right=headings, title=f"{model.name} on {parallelism.world_size} x {hardware.name}", title_justify="left"
    )
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
    """Print layouts that would fit, on at least as many GPUs as `parallelism` has.

    `read_model` raises ConfigError for flags that are invalid for the model.
    """
    found: list[list[str]] = []
    with show_working("searching for layouts"):
        for flags in _list_layouts(model, parallelism, hardware):
            with contextlib.suppress(ConfigError):
                if _fits(*read_model(flags), hardware, assumptions):
                    found.append(flags)
            if len(found) == LAYOUTS:
                break
    for flags in found:
        console.print(f"Would fit: {' '.join(flags)}", soft_wrap=True)
    if not found:
        console.print(f"No layout with up to {MOST_GPUS} GPUs fits.")


def _fits(model: ModelShape, parallelism: Parallelism, hardware: Hardware, assumptions: Assumptions) -> bool:
    """Return whether every rank fits under full recompute."""
    fits = list_fits(model, parallelism, assumptions)
    return all(one.static_bytes + one.recomputed_bytes + one.logits_bytes <= hardware.device_memory_bytes for one in fits)


def _find_peak(passes: Sequence[tuple[bool, int]], chunk_bytes: Sequence[int]) -> int:
    steps = (chunk_bytes[chunk] if is_forward else -chunk_bytes[chunk] for is_forward, chunk in passes)
    return max(itertools.accumulate(steps), default=0)


def _list_layouts(model: ModelShape, parallelism: Parallelism, hardware: Hardware) -> Iterator[list[str]]:
    """Yield the flags of candidate layouts, ordered by the number of GPUs, then by the sum of the parallel sizes."""
    domain = hardware.nvlink_gpus or hardware.gpus_per_node
    experts = 1 if model.experts is None else model.experts.num_experts
    contexts = (1, 2, 4, 8) if model.seq_length >= LONG_SEQUENCE else (1,)
    # A pipeline layout from the model's file fixes the number of pipeline ranks.
    pipelines = (1, 2, 4, 8, 16) if parallelism.pipeline_layout is None else (parallelism.pipeline_parallel_size,)
    sizes = sorted(itertools.product((1, 2, 4, 8), pipelines, contexts, (1, 2, 4, 8, 16, 32, 64)), key=sum)
    counts = (parallelism.world_size << doublings for doublings in itertools.count())
    for gpus in itertools.takewhile(lambda gpus: gpus <= MOST_GPUS, counts):
        for tensor, pipeline, context, expert in sizes:
            is_divisible = gpus % (tensor * pipeline * context) == gpus % (pipeline * expert) == experts % expert == 0
            if is_divisible and tensor <= domain:
                yield _list_flags(model, parallelism, gpus, tensor, pipeline, context, expert)


def _list_flags(
    model: ModelShape, parallelism: Parallelism, gpus: int, tensor: int, pipeline: int, context: int, expert: int
) -> list[str]:
    """Return the flags of a layout, including sizes of 1, since the model's file can set other sizes."""
    replica = parallelism.micro_batch_size * (gpus // (tensor * pipeline * context))
    samples = parallelism.microbatches * parallelism.micro_batch_size * parallelism.data_parallel_size
    sizes = {"--num-gpus": gpus, "--tp": tensor, "--pp": pipeline, "--cp": context, "--ep": expert, "--etp": 1}
    sizes["--global-batch-size"] = max(pipeline, samples // replica) * replica
    first = -(-model.num_layers // pipeline)
    if parallelism.pipeline_layout is None:
        sizes["--vp"] = 1
    if parallelism.num_layers_in_first_pipeline_stage is not None:
        sizes["--decoder-first-pipeline-num-layers"] = first
    is_uneven = model.num_layers % pipeline > 0 and parallelism.pipeline_layout is None
    if is_uneven or parallelism.num_layers_in_last_pipeline_stage is not None:
        sizes["--decoder-last-pipeline-num-layers"] = model.num_layers - (pipeline - 1) * first
    accounts = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    return [
        *(word for flag, size in sizes.items() for word in (flag, str(size))),
        *(["--sequence-parallel"] if tensor > 1 else []),
        *(to_flag(f"no_{name}") for name in accounts if getattr(parallelism, name)),
    ]
