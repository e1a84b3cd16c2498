"""Order of the forwards and backwards of a pipeline rank in a step, as in Megatron-Core's schedules.

One stage, 1F1B and the interleaved schedule have the same three phases: only forwards (warm-up), then alternating forwards and
backwards, then the remaining backwards. Rank 1 of 4 runs two forwards of warm-up:

    >>> passes = list_passes(Pipeline(stages=4, microbatches=3), rank=1)
    >>> " ".join(map(str, passes))
    'F0 F1 F2 B0 B1 B2'
    >>> count_in_flight(passes)
    3

Source: `forward_backward_no_pipelining`, `forward_backward_pipelining_without_interleaving`,
`forward_backward_pipelining_with_interleaving`, `get_pp_rank_microbatches` and `get_schedule_table` of
megatron/core/pipeline_parallel/schedules.py, and combined_1f1b.py beside it, in megatron-core 0.16.1.
`tests/unit/planner/ranks/test_schedule_megatron.py` runs them and compares.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count

MOST_FORWARDS = 1_000_000
"""Maximum forwards of a step, microbatches x stages x chunks, which take a third of a gigabyte and half a minute."""


class PassKind(enum.Enum):
    """Direction of a pass through a model chunk."""

    FORWARD = "forward"  # saves activations
    BACKWARD = "backward"  # needs and frees them

    __hash__ = object.__hash__
    """Members are singletons. The hash of `Enum` is in Python and several times slower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward or backward of one microbatch through one model chunk of a rank."""

    kind: PassKind  # forward or backward
    chunk: int  # model chunk on this rank, from 0: the virtual pipeline stage under the interleaved schedule, else 0
    microbatch: int  # microbatch of the step, from 0

    def __str__(self) -> str:
        """Return a short label, with the chunk unless it is the first: `F3`, `B0.1` for microbatch 0 of chunk 1."""
        label = f"{'F' if self.kind is PassKind.FORWARD else 'B'}{self.microbatch}"
        return f"{label}.{self.chunk}" if self.chunk else label


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Distribution of a step's layers and microbatches over pipeline ranks."""

    microbatches: int  # microbatches of a step on each data-parallel rank
    stages: int = 1  # pipeline ranks: `--pipeline-model-parallel-size`
    chunks: int = 1  # model chunks of a rank: the virtual pipeline size. Above 1 the schedule is the interleaved one.
    group_size: int | None = None
    """Microbatches that a rank runs through one chunk before the next chunk: Megatron's
    `--microbatch-group-size-per-virtual-pipeline-stage`. Defaults to the number of stages, as in Megatron."""
    has_expert_overlap: bool = False
    """Whether backwards run beside another microbatch's forward, with one more in flight:
    `--overlap-moe-expert-parallel-comm`."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "stages", "chunks"):
            check_count(name, getattr(self, name))
        if self.microbatches * self.stages * self.chunks > MOST_FORWARDS:
            most = max(1, MOST_FORWARDS // (self.stages * self.chunks))
            raise ConfigError(
                f"microbatches {self.microbatches} x stages {self.stages} x chunks {self.chunks} exceed the maximum of "
                f"{MOST_FORWARDS} forwards per step. Use {most} microbatches or less, with a smaller --global-batch-size or a "
                "larger data-parallel size."
            )
        if self.chunks > 1:
            if self.stages == 1:
                raise ConfigError(
                    f"chunks {self.chunks} with stages 1: only stages are interleaved. Give 2 stages, or 1 chunk."
                )
            self._check_groups()
            return
        if self.group_size is not None:
            raise ConfigError(f"group_size {self.group_size} with chunks 1 has no effect. Leave it out, or give 2 chunks.")
        if self.has_expert_overlap and self.stages > 1:
            raise ConfigError(
                f"has_expert_overlap with stages {self.stages} and chunks 1: Megatron overlaps experts on one stage or "
                "under the interleaved schedule. Give 2 chunks, or leave it out."
            )

    @property
    def microbatches_of_group(self) -> int:
        """Microbatches of each group; the last one has the rest."""
        return self.stages if self.group_size is None else self.group_size

    @property
    def is_full(self) -> bool:
        """Whether more microbatches would not raise the number in flight, on any rank and in any chunk.

        The first rank has the most in flight. It is full if it reaches a backward before it runs out of forwards, and with
        several chunks if a second group follows.
        """
        has_groups = self.chunks == 1 or self.microbatches >= 2 * self.microbatches_of_group
        return has_groups and count_warmup_passes(self, rank=0) < self.microbatches * self.chunks

    def _check_groups(self) -> None:
        size = self.microbatches_of_group
        check_count("group_size", size)
        if self.microbatches < self.stages:
            raise ConfigError(
                f"microbatches {self.microbatches} is below stages {self.stages}, which Megatron's interleaved schedule cannot "
                f"run. Give {self.stages} microbatches or more, or 1 chunk."
            )
        if not self.stages <= size <= self.microbatches:
            raise ConfigError(
                f"group_size {size} is not from stages {self.stages} to microbatches {self.microbatches}. "
                "Give a number between, or leave it out."
            )
        left = self.microbatches % size
        if 0 < left < self.stages:
            raise ConfigError(
                f"microbatches {self.microbatches} leave a last group of {left} after groups of {size}, below stages "
                f"{self.stages}. Give a multiple of {size} microbatches, or a group_size "
                f"(--microbatch-group-size-per-virtual-pipeline-stage) that leaves {self.stages} or more."
            )


def list_passes(pipeline: Pipeline, *, rank: int) -> tuple[Pass, ...]:
    """Return the forwards and backwards of pipeline rank `rank` in a step, in order: of every microbatch through every chunk.

    With several stages it is 1F1B; with several chunks the interleaved schedule. Under expert overlap Megatron runs a forward
    and a backward of two microbatches at once: the forward is listed first.
    """
    warmup = count_warmup_passes(pipeline, rank=rank)
    table = _list_table(pipeline)
    forwards = [Pass(kind=PassKind.FORWARD, chunk=chunk, microbatch=microbatch) for chunk, microbatch in table]
    # Backward has the order of forward with reversed chunks.
    backwards = [
        Pass(kind=PassKind.BACKWARD, chunk=pipeline.chunks - 1 - chunk, microbatch=microbatch) for chunk, microbatch in table
    ]
    steady = len(table) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *(one for pair in pairs for one in pair), *backwards[steady:])


def count_warmup_passes(pipeline: Pipeline, *, rank: int) -> int:
    """Return the number of forwards of rank `rank` before forwards and backwards alternate.

    With p stages, m microbatches, v chunks and groups of g, on rank r: 0 on one stage, min(p - r - 1, m) under 1F1B, and
    min(2 (p - r - 1) + (v - 1) g, m v) interleaved. Expert overlap adds 1, up to the same limit.

    Source: `get_pp_rank_microbatches` of Megatron-Core.
    """
    behind = pipeline.stages - rank - 1
    if pipeline.chunks > 1:
        behind = 2 * behind + (pipeline.chunks - 1) * pipeline.microbatches_of_group
    return min(behind + pipeline.has_expert_overlap, pipeline.microbatches * pipeline.chunks)


def find_turning_chunk(pipeline: Pipeline, *, rank: int) -> int | None:
    """Return the chunk of rank `rank` in which each backward follows its forward at once, or None.

    It is the last chunk of the model. None under expert overlap, where another microbatch's forward runs beside that backward.
    """
    return pipeline.chunks - 1 if rank == pipeline.stages - 1 and not pipeline.has_expert_overlap else None


def count_in_flight(passes: Iterable[Pass], *, chunk: int | None = None) -> int:
    """Return the maximum number of microbatches in flight: in one chunk, or in all together.

    A microbatch counts once in each chunk, from its forward to the end of its backward there.
    """
    most = current = 0
    for one in passes:
        if chunk is not None and one.chunk != chunk:
            continue
        current += 1 if one.kind is PassKind.FORWARD else -1
        most = max(most, current)
    return most


def _list_table(pipeline: Pipeline) -> Sequence[tuple[int, int]]:
    """Return chunk and microbatch of each forward in order: a group of microbatches through all chunks, then the next group.

    Source: `get_schedule_table` of Megatron-Core.
    """
    size = pipeline.microbatches_of_group
    starts = range(0, pipeline.microbatches, size)
    groups = [range(start, min(start + size, pipeline.microbatches)) for start in starts]
    return [(chunk, microbatch) for group in groups for chunk in range(pipeline.chunks) for microbatch in group]
