"""Lists the forwards and backwards of a pipeline rank in order, as in Megatron-Core's schedules.

A single stage, 1F1B and the interleaved schedule all have three phases: warm-up (only forwards), then alternating forwards and
backwards, then the remaining backwards. Rank 1 of 4 runs two warm-up forwards:

    >>> passes = list_passes(Pipeline(stages=4, microbatches=3), rank=1)
    >>> " ".join(map(str, passes))
    'F0 F1 F2 B0 B1 B2'
    >>> count_in_flight(passes)
    3

Source: `forward_backward_no_pipelining`, `forward_backward_pipelining_without_interleaving`,
`forward_backward_pipelining_with_interleaving`, `get_pp_rank_microbatches` and `get_schedule_table` of
megatron/core/pipeline_parallel/schedules.py, and combined_1f1b.py beside it, in megatron-core 0.16.1.
`tests/unit/planner/ranks/test_schedule_megatron.py` compares the order with these functions.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count

MOST_FORWARDS = 1_000_000
"""Maximum forwards per step: microbatches x stages x chunks. Simulating a step of this size takes 0.3 GB and half a minute."""


class PassKind(enum.Enum):
    """Direction of a pass through a model chunk."""

    FORWARD = "forward"  # saves activations
    BACKWARD = "backward"  # uses and frees activations

    __hash__ = object.__hash__
    """Identity hash. Members are singletons, and `Enum`'s own hash is several times slower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward or backward of one microbatch through one model chunk of a rank."""

    kind: PassKind
    chunk: int  # model chunk on this rank, from 0; always 0 unless the schedule is interleaved
    microbatch: int  # microbatch of the step, from 0

    def __str__(self) -> str:
        """Return a short label such as `F3`, or `B0.1` for microbatch 0 of chunk 1. Labels omit chunk 0."""
        label = f"{'F' if self.kind is PassKind.FORWARD else 'B'}{self.microbatch}"
        return f"{label}.{self.chunk}" if self.chunk else label


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Distribution of a step's layers and microbatches over pipeline ranks."""

    microbatches: int  # microbatches of a step on each data-parallel rank
    stages: int = 1  # pipeline ranks: `--pipeline-model-parallel-size`
    chunks: int = 1  # model chunks per rank, the virtual pipeline size; above 1, the schedule is interleaved
    group_size: int | None = None
    """Microbatches that a rank runs through one chunk before the next one: Megatron's
    `--microbatch-group-size-per-virtual-pipeline-stage`. Defaults to the number of stages, as in Megatron."""
    has_expert_overlap: bool = False
    """`--overlap-moe-expert-parallel-comm`: a backward overlaps with another forward, so one more microbatch is in flight."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "stages", "chunks"):
            check_count(name, getattr(self, name))
        if self.microbatches * self.stages * self.chunks > MOST_FORWARDS:
            most = max(1, MOST_FORWARDS // (self.stages * self.chunks))
            raise ConfigError(
                f"microbatches {self.microbatches} x stages {self.stages} x chunks {self.chunks} exceed the maximum of "
                f"{MOST_FORWARDS} forwards per step. Use {most} microbatches or fewer, with a smaller --global-batch-size or a "
                "larger data-parallel size."
            )
        if self.chunks > 1:
            if self.stages == 1:
                raise ConfigError(
                    f"chunks {self.chunks} with stages 1: interleaving requires several stages. Use 2 stages, or 1 chunk."
                )
            self._check_groups()
            return
        if self.group_size is not None:
            raise ConfigError(f"group_size {self.group_size} with chunks 1 has no effect. Remove it, or use 2 chunks.")
        if self.has_expert_overlap and self.stages > 1:
            raise ConfigError(
                f"has_expert_overlap is not supported with stages {self.stages} and chunks 1: Megatron overlaps experts only "
                "on one stage or under the interleaved schedule. Use 2 chunks, or remove has_expert_overlap."
            )

    @property
    def microbatches_of_group(self) -> int:
        """Microbatches per group; the last group may have fewer."""
        return self.stages if self.group_size is None else self.group_size

    @property
    def is_full(self) -> bool:
        """Whether more microbatches per step would leave the number in flight unchanged, on every rank and in every chunk.

        The first rank has the most microbatches in flight. Their number reaches its maximum if the rank starts a backward
        before its last forward and, with several chunks, if there is a second group.
        """
        has_groups = self.chunks == 1 or self.microbatches >= 2 * self.microbatches_of_group
        return has_groups and count_warmup_passes(self, rank=0) < self.microbatches * self.chunks

    def shorten(self) -> "Pipeline":
        """Return the pipeline with fewer microbatches but the same peaks: four whole groups and the incomplete last group."""
        size = self.microbatches_of_group
        return dataclasses.replace(self, microbatches=min(self.microbatches, 4 * size + self.microbatches % size))

    def _check_groups(self) -> None:
        size = self.microbatches_of_group
        check_count("group_size", size)
        if self.microbatches < self.stages:
            raise ConfigError(
                f"microbatches {self.microbatches} is below stages {self.stages}, the minimum of Megatron's interleaved "
                f"schedule. Use {self.stages} microbatches or more, or 1 chunk."
            )
        if not self.stages <= size <= self.microbatches:
            raise ConfigError(
                f"group_size {size} must be from stages {self.stages} to microbatches {self.microbatches}. "
                "Use a number in this range, or remove it."
            )
        left = self.microbatches % size
        if 0 < left < self.stages:
            raise ConfigError(
                f"microbatches {self.microbatches} in groups of {size} leave a last group of {left}, which is below stages "
                f"{self.stages}. Use a multiple of {size} microbatches, or a group_size "
                f"(--microbatch-group-size-per-virtual-pipeline-stage) that leaves {self.stages} or more."
            )


def list_passes(pipeline: Pipeline, *, rank: int) -> tuple[Pass, ...]:
    """Return the passes of pipeline rank `rank` in a step, in order: every microbatch runs through every chunk.

    Several stages run 1F1B; several chunks run the interleaved schedule. With expert overlap, Megatron runs the forward of one
    microbatch concurrently with the backward of another; the forward is listed first.
    """
    warmup = count_warmup_passes(pipeline, rank=rank)
    table = _list_table(pipeline)
    forwards = [Pass(kind=PassKind.FORWARD, chunk=chunk, microbatch=microbatch) for chunk, microbatch in table]
    # Backwards run in the order of forwards, with the chunks reversed.
    backwards = [
        Pass(kind=PassKind.BACKWARD, chunk=pipeline.chunks - 1 - chunk, microbatch=microbatch) for chunk, microbatch in table
    ]
    steady = len(table) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *(one for pair in pairs for one in pair), *backwards[steady:])


def count_warmup_passes(pipeline: Pipeline, *, rank: int) -> int:
    """Return the number of forwards of rank `rank` before forwards and backwards alternate.

    With p stages, m microbatches, v chunks and groups of g, the number for rank r is 0 on one stage, min(p - r - 1, m) with
    1F1B, and min(2(p-r-1) + (v-1)g, mv) with the interleaved schedule. Expert overlap adds 1, up to the same limit.
    """
    warmup = pipeline.stages - rank - 1
    if pipeline.chunks > 1:
        warmup = 2 * warmup + (pipeline.chunks - 1) * pipeline.microbatches_of_group
    return min(warmup + pipeline.has_expert_overlap, pipeline.microbatches * pipeline.chunks)


def find_turning_chunk(pipeline: Pipeline, *, rank: int) -> int | None:
    """Return the chunk of rank `rank` in which each backward directly follows its forward, or None.

    It is the last chunk of the model. With expert overlap there is none, because that backward overlaps with another forward.
    """
    return pipeline.chunks - 1 if rank == pipeline.stages - 1 and not pipeline.has_expert_overlap else None


def count_in_flight(passes: Iterable[Pass], *, chunk: int | None = None) -> int:
    """Return the maximum number of microbatches in flight, in `chunk` or in all chunks together.

    A microbatch counts once per chunk, from its forward to the end of its backward in that chunk.
    """
    most = current = 0
    for one in passes:
        if chunk is not None and one.chunk != chunk:
            continue
        current += 1 if one.kind is PassKind.FORWARD else -1
        most = max(most, current)
    return most


def _list_table(pipeline: Pipeline) -> Sequence[tuple[int, int]]:
    """Return the chunk and microbatch of each forward, in order: each group of microbatches runs through all chunks in turn."""
    size = pipeline.microbatches_of_group
    starts = range(0, pipeline.microbatches, size)
    groups = [range(start, min(start + size, pipeline.microbatches)) for start in starts]
    return [(chunk, microbatch) for group in groups for chunk in range(pipeline.chunks) for microbatch in group]
