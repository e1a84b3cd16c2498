"""Derives a plan's parallel sizes and number of microbatches from Megatron's flags."""

import math
import types
from collections.abc import Mapping
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import to_flag
from fgoffload.planner.checks import LARGEST_SIZE, check_count
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, check_shared_layers, list_chunks
from fgoffload.planner.model.pipeline_layout import parse_layout

_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
"""Flag for each size in `Parallelism`, with `_` for `-`."""

FIELD_FLAGS: Mapping[str, str] = types.MappingProxyType(
    {
        **_SIZES,
        "virtual_pipeline_size": "num_virtual_stages_per_pipeline_rank",
        "microbatch_group_size": "microbatch_group_size_per_virtual_pipeline_stage",
        "has_sequence_parallel": "sequence_parallel",
        "has_distributed_optimizer": "use_distributed_optimizer",
        "has_expert_overlap": "overlap_moe_expert_parallel_comm",
        "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
        "pipeline_layout": "pipeline_model_parallel_layout",
    }
)
"""Flag for each field of `Parallelism`, except `data_parallel_size` and `microbatches`, which depend on several flags."""

VIRTUAL_STAGE_FLAGS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""Flags that set the number of model chunks per rank, with `_` for `-`. Megatron-LM accepts only one of them at a time."""

MICROBATCHES_OF_A_CHUNK = 4
"""Default ratio of microbatches to the pipeline's model chunks. At 4, pipeline ranks idle for less than 20% of the step."""


def make_parallelism(
    values: Mapping[str, Any], model: ModelShape, *, num_gpus: int | None, fills_pipeline: bool = False
) -> Parallelism:
    """Return the parallelism and microbatches that the flags describe. Raise a ConfigError for an invalid value.

    The keys of `values` are flag names, with `_` for `-`. Absent flags have no entry. Without `--num-gpus` or `num_gpus`, the
    plan uses the minimum number of ranks for the model and its experts. Without `--global-batch-size`, a step has one
    microbatch, as in Megatron, or, with `fills_pipeline`, enough to fill the pipeline.
    """
    sizes = _read_sizes(values)
    # Check this first: if a layer cannot be split evenly, the number of GPUs that the error below suggests would not help.
    layer_sizes = ("tensor_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size")
    check_shared_layers(model, **{field: sizes[field] for field in layer_sizes})
    try:
        data_parallel_size = _count_data_parallel(sizes, values, num_gpus)
    except ConfigError:
        # If the layers cannot be divided among the stages either, raise that error, since no number of GPUs would help.
        others = {flag: value for flag, value in values.items() if flag not in ("num_gpus", "global_batch_size")}
        list_chunks(model, make_parallelism(others, model, num_gpus=None, fills_pipeline=True))
        raise
    stages = sizes["pipeline_parallel_size"]
    virtual_size = count_chunks(values, model.num_layers, stages)
    default = _count_microbatches_that_fill(values, stages=stages, virtual_size=virtual_size) if fills_pipeline else 1
    fields = {"has_sequence_parallel": False, **{field: values[flag] for field, flag in FIELD_FLAGS.items() if flag in values}}
    fields |= {
        **sizes,
        "virtual_pipeline_size": virtual_size,
        "data_parallel_size": data_parallel_size,
        "microbatches": _count_microbatches(values, sizes["micro_batch_size"], data_parallel_size, default=default),
    }
    return Parallelism(**fields)


def _read_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    sizes = {field: values.get(flag, 1) for field, flag in _SIZES.items()}
    # In Megatron, the expert tensor-parallel size defaults to the tensor-parallel size.
    sizes["expert_tensor_parallel_size"] = values.get("expert_tensor_parallel_size", sizes["tensor_parallel_size"])
    for field, size in sizes.items():
        check_count(to_flag(_SIZES[field]), size, most=LARGEST_SIZE)
    return sizes


def _count_data_parallel(sizes: Mapping[str, int], values: Mapping[str, Any], num_gpus: int | None) -> int:
    is_flag = "num_gpus" in values
    num_gpus = values.get("num_gpus", num_gpus)
    pipeline = sizes["pipeline_parallel_size"]
    model = sizes["tensor_parallel_size"] * pipeline * sizes["context_parallel_size"]
    experts = sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"] * pipeline
    fewest = math.lcm(model, experts)
    if num_gpus is None:
        return fewest // model
    check_count("--num-gpus" if is_flag else "the file's number of GPUs", num_gpus, most=LARGEST_SIZE)
    if num_gpus % fewest:
        needs = f"copies of the model ({model} ranks) and of its experts ({experts} ranks) need"
        if fewest == model:
            needs = "a copy of the model needs (tensor x pipeline x context parallel size)"
        given = f"--num-gpus {num_gpus} is" if is_flag else f"the {num_gpus} GPUs of the file are"
        fix = f"--num-gpus {-(-num_gpus // fewest) * fewest}, or smaller parallel sizes"
        unsharded = math.lcm(model, experts // sizes["tensor_parallel_size"])
        if "expert_tensor_parallel_size" not in values and num_gpus % unsharded == 0:
            tensor = f"--tensor-model-parallel-size {sizes['tensor_parallel_size']}"
            fix = f"--expert-tensor-parallel-size 1 (--etp), which otherwise equals {tensor}, or {fix}"
        raise ConfigError(f"{given} not a multiple of {fewest}, which {needs}. Use {fix}.")
    return num_gpus // model


def _count_microbatches_that_fill(values: Mapping[str, Any], *, stages: int, virtual_size: int | None) -> int:
    layout = values.get("pipeline_model_parallel_layout")
    chunks = (virtual_size or 1) if layout is None else max(1, len(parse_layout(layout)) // stages)
    group = values.get("microbatch_group_size_per_virtual_pipeline_stage") or 1
    return -(-MICROBATCHES_OF_A_CHUNK * stages * chunks // group) * group


def _count_microbatches(values: Mapping[str, Any], micro_batch_size: int, data_parallel_size: int, *, default: int) -> int:
    one = micro_batch_size * data_parallel_size
    sequences = values.get("global_batch_size", default * one)
    check_count("--global-batch-size", sequences, most=LARGEST_SIZE)
    if sequences % one:
        raise ConfigError(
            f"--global-batch-size {sequences} is not a multiple of --micro-batch-size {micro_batch_size} x data-parallel size "
            f"{data_parallel_size} = {one}. Use {-(-sequences // one) * one}, or another --num-gpus."
        )
    return int(sequences // one)


def count_chunks(values: Mapping[str, Any], num_layers: int, stages: int) -> int | None:
    """Return the number of model chunks per rank from either of Megatron-LM's two flags.

    Raise a ConfigError if both are set, or if the layers cannot be divided evenly.
    """
    per_chunk, chunks = (values.get(name) for name in VIRTUAL_STAGE_FLAGS)
    if per_chunk is None:
        return chunks
    if chunks is not None:
        flags = [f"{to_flag(name)} {value}" for name, value in zip(VIRTUAL_STAGE_FLAGS, (per_chunk, chunks), strict=True)]
        raise ConfigError(
            f"{' and '.join(flags)} (--vp) both set the number of chunks per rank. Use only one of them. To override a file, "
            "pass the flag that the file uses."
        )
    check_count("--num-layers-per-virtual-pipeline-stage", per_chunk)
    # The embedding and the loss may each count as a layer.
    counted = num_layers + sum(values.get(f"account_for_{part}_in_pipeline_split", False) for part in ("embedding", "loss"))
    if counted % (stages * per_chunk):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} x {stages} stages does not divide the {counted} layers. Use "
            "a number that divides them, or --num-virtual-stages-per-pipeline-rank."
        )
    return int(counted // (stages * per_chunk))
