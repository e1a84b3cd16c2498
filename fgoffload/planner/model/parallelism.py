"""Parallel sizes of a training run, and the layers of each pipeline rank.

    >>> parallelism = Parallelism(pipeline_parallel_size=2, virtual_pipeline_size=2, microbatches=8)
    >>> parallelism.pipeline.chunks
    2

`list_chunks` returns the layers of each rank. Megatron-Core splits the layers in order over virtual stages. With p ranks, chunk
c of rank r is virtual stage c p + r.

Source: `get_num_layers_to_build`, `get_transformer_layer_offset` and `PipelineParallelLayerLayout` of megatron-core 0.16.1.
`tests/unit/planner/model/test_parallelism.py` compares the results.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_count
from fgoffload.planner.model.pipeline_layout import check_layout, parse_layout
from fgoffload.planner.ranks.schedule import Pipeline

if TYPE_CHECKING:
    from fgoffload.planner.model.model_shape import ModelShape

_PIPELINE_FIELDS: Mapping[str, str] = {
    "stages": "pipeline_parallel_size",
    "chunks": "virtual_pipeline_size",
    "group_size": "microbatch_group_size",
}
"""Maps fields of `Pipeline` to the `Parallelism` fields that set them."""

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Fields that set how layers are split over stages without a layout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Parallel sizes of a training run, and the microbatches of a step."""

    tensor_parallel_size: int = 1  # ranks that share each layer
    pipeline_parallel_size: int = 1  # pipeline ranks
    virtual_pipeline_size: int | None = None
    """Model chunks per pipeline rank. Default: the number in `pipeline_layout` if set, otherwise 1. See `chunks`."""
    context_parallel_size: int = 1  # ranks that share each sequence
    expert_parallel_size: int = 1  # ranks that share the experts of a layer
    expert_tensor_parallel_size: int = 1
    """Ranks that share each expert. Readers of Megatron's flags use Megatron's default, the tensor parallel size."""
    data_parallel_size: int = 1  # copies of the model; experts can be sharded over them
    micro_batch_size: int = 1  # sequences per microbatch
    microbatches: int = 1  # microbatches of a step on each data-parallel rank
    microbatch_group_size: int | None = None
    """Value of `--microbatch-group-size-per-virtual-pipeline-stage`. Defaults to the number of pipeline ranks."""
    has_sequence_parallel: bool = True
    """Whether tensor-parallel ranks shard the sequence: `--sequence-parallel`. No effect if the tensor parallel size is 1."""
    has_distributed_optimizer: bool = True
    """Whether data-parallel ranks shard the optimizer's state: `--use-distributed-optimizer`."""
    has_expert_overlap: bool = False  # whether `--overlap-moe-expert-parallel-comm` is set
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of pipeline rank 0, over all its chunks: `--decoder-first-pipeline-num-layers`. None means an equal share."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank: `--decoder-last-pipeline-num-layers`."""
    account_for_embedding_in_pipeline_split: bool = False  # whether the embedding counts as a layer in the split
    account_for_loss_in_pipeline_split: bool = False  # whether the loss counts as a layer in the split
    pipeline_layout: str | None = None
    """Layers of each virtual stage: `--pipeline-model-parallel-layout`. See `pipeline_layout.parse_layout`."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
            "expert_tensor_parallel_size",
            "data_parallel_size",
            "micro_batch_size",
        ):
            check_count(name, getattr(self, name), most=LARGEST_SIZE)
        for name in ("virtual_pipeline_size", *_ENDS):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), most=LARGEST_SIZE)
        self._check_experts()
        self._check_split()
        try:
            _ = self.pipeline  # checks chunks, microbatches and groups
        except ConfigError as error:
            message = re.sub(r"\b(stages|chunks|group_size)(?= \d)", lambda match: _PIPELINE_FIELDS[match[1]], str(error))
            raise ConfigError(message) from error

    @property
    def chunks(self) -> int:
        """Model chunks per pipeline rank."""
        if self.pipeline_layout is not None:
            return len(parse_layout(self.pipeline_layout)) // self.pipeline_parallel_size
        return self.virtual_pipeline_size or 1

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline schedule of a step."""
        return Pipeline(
            microbatches=self.microbatches,
            stages=self.pipeline_parallel_size,
            chunks=self.chunks,
            group_size=self.microbatch_group_size,
            has_expert_overlap=self.has_expert_overlap,
        )

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.model_parallel_size * self.data_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert."""
        experts = self.expert_tensor_parallel_size * self.expert_parallel_size * self.pipeline_parallel_size
        return self.world_size // experts

    def check_model(self, model: "ModelShape") -> None:
        """Reject a model that these parallel sizes cannot shard."""
        tensor, context = self.tensor_parallel_size, self.context_parallel_size
        check_shared_layers(
            model,
            tensor_parallel_size=tensor,
            expert_parallel_size=self.expert_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )
        parts = {
            "experts": model.experts is not None,
            "latent attention": model.latent is not None,
            "multi-token prediction": model.mtp_num_layers > 0,
        }
        for part in (part for part, is_present in parts.items() if is_present):
            if tensor > 1 and not self.has_sequence_parallel:
                raise ConfigError(
                    f"tensor_parallel_size {tensor} without has_sequence_parallel is not supported with {part}. "
                    "Use --sequence-parallel."
                )
        # Megatron gives each context-parallel rank two parts of the sequence, one from each half.
        pieces = tensor * (2 * context if context > 1 else 1)
        for name, size, divisor, factors in (
            ("seq_length", model.seq_length, pieces, f"tensor_parallel_size {tensor} x context_parallel_size {context}"),
            ("vocab_size", model.vocab_size, tensor, f"tensor_parallel_size {tensor}"),
        ):
            if size % divisor:
                raise ConfigError(
                    f"{name} {size} of {model.name} is not a multiple of {divisor}, which {factors} requires. "
                    f"Use {-(-size // divisor) * divisor}, or smaller parallel sizes."
                )

    def _check_experts(self) -> None:
        experts = self.expert_tensor_parallel_size * self.expert_parallel_size
        ranks = self.world_size // self.pipeline_parallel_size
        if ranks % experts:
            raise ConfigError(
                f"expert_parallel_size {self.expert_parallel_size} x expert_tensor_parallel_size "
                f"{self.expert_tensor_parallel_size} does not divide the {ranks} ranks of a pipeline stage (tensor x context x "
                f"data parallel size). Use a multiple of {experts} ranks, or smaller expert parallel sizes."
            )

    def _check_split(self) -> None:
        """Reject conflicting settings for how layers are split across stages."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        settings = (
            [] if self.pipeline_layout is None else ["pipeline_layout"],
            [f"{name} {getattr(self, name)}" for name in _ENDS if getattr(self, name) is not None],
            [name for name in _ACCOUNTS if getattr(self, name)],
        )
        if sum(map(bool, settings)) > 1:
            given = " and ".join(name for names in settings for name in names)
            raise ConfigError(f"{given} are mutually exclusive, because each sets the layers per stage. Use one of them.")
        if None not in (first, last) and self.pipeline_parallel_size == 2 and self.chunks > 1:
            # megatron-core 0.16.1 divides by the number of stages between the first and the last, which is 0 here.
            raise ConfigError(
                f"Megatron-Core does not support num_layers_in_first_pipeline_stage {first} together with "
                f"num_layers_in_last_pipeline_stage {last} on 2 stages of {self.chunks} chunks. Set only one of the two."
            )
        if self.pipeline_layout is None:
            return
        stages, ranks = len(parse_layout(self.pipeline_layout)), self.pipeline_parallel_size
        if stages % ranks or self.virtual_pipeline_size not in (None, stages // ranks):
            raise ConfigError(
                f"pipeline_layout {self.pipeline_layout!r} has {stages} stages, not pipeline_parallel_size {ranks} x "
                f"virtual_pipeline_size {self.virtual_pipeline_size}. Change one of them, or remove virtual_pipeline_size."
            )


def check_shared_layers(
    model: "ModelShape", *, tensor_parallel_size: int, expert_parallel_size: int, expert_tensor_parallel_size: int
) -> None:
    """Reject parallel sizes that do not divide the dimensions of a layer."""
    groups = model.num_query_groups
    # Without --group-query-attention, Megatron sets the groups to the number of heads, so the error mentions the heads.
    groups_name = "num_attention_heads {}" if groups == model.num_attention_heads else "num_query_groups {}"
    rows = [
        ("tensor_parallel_size", tensor_parallel_size, groups_name, groups),
        ("tensor_parallel_size", tensor_parallel_size, "ffn_hidden_size {}", model.ffn_hidden_size),
    ]
    if model.experts is not None:
        shared, channels = model.experts.shared_ffn_hidden_size, model.experts.ffn_hidden_size
        rows += [
            ("expert_parallel_size", expert_parallel_size, "num_experts {}", model.experts.num_experts),
            ("tensor_parallel_size", tensor_parallel_size, "moe_shared_expert_intermediate_size {}", shared),
            ("expert_tensor_parallel_size", expert_tensor_parallel_size, "moe_ffn_hidden_size {}", channels),
        ]
    elif expert_parallel_size > 1:
        raise ConfigError(f"expert_parallel_size {expert_parallel_size} requires experts, but {model.name} has none. Use 1.")
    for name, size, label, count in rows:
        if count % size:
            raise ConfigError(f"{name} {size} does not divide {label.format(count)} of {model.name}. Use a size that does.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageChunk:
    """Layers, embedding and output of one model chunk."""

    layers: tuple[int, ...]
    """Layer numbers in the whole model, in forward order. Multi-token prediction layers are numbered from `num_layers`. The
    chunk that contains them has a copy of the embedding's weights, unless it has the embedding itself."""
    has_embedding: bool  # whether the chunk begins with the embedding of the model
    has_output: bool  # whether the chunk ends with the final norm, the output layer and the loss


def list_chunks(model: "ModelShape", parallelism: Parallelism) -> tuple[tuple[StageChunk, ...], ...]:
    """Return the model chunks of each pipeline rank, as one tuple per rank."""
    parallelism.check_model(model)
    ranks, chunks = parallelism.pipeline_parallel_size, parallelism.chunks
    counts = _count_layers(model, parallelism)
    begins = [sum(counts[:stage]) for stage in range(len(counts))]
    predictions = tuple(range(model.num_layers, model.num_layers + model.mtp_num_layers))
    prediction_stage = _find_prediction_stage(parallelism)
    stages = [
        StageChunk(
            layers=(*range(begin, begin + count), *(predictions if stage == prediction_stage else ())),
            has_embedding=stage == 0,
            has_output=stage == ranks * chunks - 1,
        )
        for stage, (begin, count) in enumerate(zip(begins, counts, strict=True))
    ]
    return tuple(tuple(stages[chunk * ranks + rank] for chunk in range(chunks)) for rank in range(ranks))


def _find_prediction_stage(parallelism: Parallelism) -> int:
    """Return the virtual stage of multi-token prediction: the last one unless a layout sets another."""
    if parallelism.pipeline_layout is not None:
        letters = parse_layout(parallelism.pipeline_layout)
        return next((stage for stage, names in enumerate(letters) if "m" in names), len(letters) - 1)
    return parallelism.pipeline_parallel_size * parallelism.chunks - 1


def _count_layers(model: "ModelShape", parallelism: Parallelism) -> list[int]:
    if parallelism.pipeline_layout is not None:
        check_layout(
            parallelism.pipeline_layout,
            num_layers=model.num_layers,
            mtp_num_layers=model.mtp_num_layers,
            pipeline_parallel_size=parallelism.pipeline_parallel_size,
        )
        return [letters.count("t") for letters in parse_layout(parallelism.pipeline_layout)]
    chunks = parallelism.chunks
    counts_by_rank = _count_layers_by_rank(model, parallelism)
    for rank, count in enumerate(counts_by_rank):
        if count % chunks:
            raise ConfigError(
                f"pipeline rank {rank} of {model.name} has {count} layers, which is not a multiple of virtual_pipeline_size "
                f"{chunks}. Use a size that divides it, or a pipeline_layout."
            )
    counts = [count // chunks for _ in range(chunks) for count in counts_by_rank]
    # Embedding and loss each take the place of a layer if they count as layers.
    counts[0] -= parallelism.account_for_embedding_in_pipeline_split
    counts[-1] -= parallelism.account_for_loss_in_pipeline_split
    return counts


def _count_layers_by_rank(model: "ModelShape", parallelism: Parallelism) -> list[int]:
    """Return the number of layers of each pipeline rank, including embedding and loss if they count as layers."""
    ranks = parallelism.pipeline_parallel_size
    first, last = parallelism.num_layers_in_first_pipeline_stage, parallelism.num_layers_in_last_pipeline_stage
    between = ranks - (first is not None) - (last is not None)
    left = model.num_layers - (first or 0) - (last or 0)
    left += parallelism.account_for_embedding_in_pipeline_split + parallelism.account_for_loss_in_pipeline_split
    if between < 0 or left < 0 or (left % between if between else left) or (between and not left):
        raise ConfigError(_describe_split(model, parallelism, between=between, left=left))
    counts = [left // between] * between if between else []
    return [*([] if first is None else [first]), *counts, *([] if last is None else [last])]


def _describe_split(model: "ModelShape", parallelism: Parallelism, *, between: int, left: int) -> str:
    ranks = parallelism.pipeline_parallel_size
    first, last = parallelism.num_layers_in_first_pipeline_stage, parallelism.num_layers_in_last_pipeline_stage
    if first is not None or last is not None:
        given = " and ".join(f"{name} {getattr(parallelism, name)}" for name in _ENDS if getattr(parallelism, name) is not None)
        if between < 0:
            return f"{given} set two stages, but pipeline_parallel_size is {ranks}. Use a size of 2 or more, or set only one."
        return (
            f"{given}: {max(left, 0)} of num_layers {model.num_layers} of {model.name} remain for {between} other stages. "
            f"Change the sizes to leave {f'a positive multiple of {between}' if between else 'none'}."
        )
    counted = f" ({left} with embedding and loss)" if left != model.num_layers else ""
    return (
        f"num_layers {model.num_layers} of {model.name}{counted} is not a multiple of pipeline_parallel_size {ranks}. Use a "
        f"size that divides {left}, set uneven first and last stages with --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers, or pass a pipeline_layout."
    )
