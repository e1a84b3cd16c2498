"""What a plan comes to: the time, the memory, the waits and the copies of a training step, without a device.

    result = simulate(ranks, plan)
    result.step_s, result.worst_rank.peak_bytes, result.worst_rank.peak_at

Each rank has three lanes: compute, copies to the host and copies to the device. Window and prefetch are those of
`fgoffload.policy.TransferPolicy`, asked when the engine asks them. Ranks wait for each other as the pipeline's schedule has it.
docs/planner.md says what is taken into account, and what is not.
"""

import collections
import math
from collections.abc import Mapping, Sequence

from fgoffload.errors import ConfigError, PlanError
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.chunk_compiler import Actions, compile_rank
from fgoffload.planner.rank_model import RankModel
from fgoffload.planner.rank_run import RankRun
from fgoffload.planner.schedule import Pass, PassKind
from fgoffload.planner.simulation_result import Detail, RankResult, StepResult
from fgoffload.planner.tallies import Recorder

__all__ = ["Detail", "RankResult", "StepResult", "simulate", "simulate_rank"]


def simulate(
    ranks: Sequence[RankModel], plan: OffloadPlan, *, p2p_s: float = 0.0, detail: Detail = Detail.TOTALS
) -> StepResult:
    """Return what a step under `plan` comes to on all ranks of a pipeline.

    Args:
        ranks: All of them, in order. Each has as many chunks; chunk c of rank r is virtual stage c * p + r of p ranks.
        plan: For all ranks; what it does not name is kept.
        p2p_s: Seconds from the end of a pass to the moment when the next stage can begin with its output.
        detail: What to note.

    Raises:
        ConfigError: The ranks are no pipeline, or their passes wait for each other for ever.
        PlanError: A layer cannot do what the plan says of it, or no rank has that layer.
    """
    _check_ranks(ranks, p2p_s)
    actions = _group_by_layer(plan)
    _check_layers(ranks, actions)
    runs = [_start(rank, actions, detail) for rank in ranks]
    _Pipeline(ranks, runs, p2p_s).run()
    return StepResult(ranks=tuple(run.finish() for run in runs))


def simulate_rank(rank: RankModel, plan: OffloadPlan, *, detail: Detail = Detail.TOTALS) -> RankResult:
    """Return what a step under `plan` comes to on one rank that never waits for its neighbours.

    Args:
        rank: The rank.
        plan: For all ranks: what it says of layers that this one does not have is not looked at.
        detail: What to note.

    Raises:
        PlanError: A layer cannot do what the plan says of it.
    """
    run = _start(rank, _group_by_layer(plan), detail)
    for one in rank.passes:
        run.run_pass(one, ready_s=0.0)
    return run.finish()


def _start(rank: RankModel, actions: Actions, detail: Detail) -> RankRun:
    return RankRun(rank, compile_rank(rank, actions), recorder=Recorder() if detail is Detail.TIMELINE else None)


def _group_by_layer(plan: OffloadPlan) -> dict[tuple[int, int], Mapping[str, Action]]:
    actions: dict[tuple[int, int], dict[str, Action]] = collections.defaultdict(dict)
    for site, action in plan.actions.items():
        actions[site.chunk, site.layer][site.tag] = action
    return dict(actions)


def _check_ranks(ranks: Sequence[RankModel], p2p_s: float) -> None:
    numbers = [rank.rank for rank in ranks]
    if not ranks or numbers != list(range(len(ranks))):
        raise ConfigError(f"ranks {numbers} are not all ranks of a pipeline in order. Give ranks 0, 1, and so on.")
    counts = [len(rank.chunks) for rank in ranks]
    if len(set(counts)) > 1:
        raise ConfigError(f"ranks have {counts} chunks. Give each as many: those of a pipeline are interleaved.")
    if not 0 <= p2p_s < math.inf:
        raise ConfigError(f"p2p_s {p2p_s} is not a number of seconds from 0. Give such a number.")


def _check_layers(ranks: Sequence[RankModel], actions: Actions) -> None:
    known = {(number, layer.number) for rank in ranks for number, chunk in enumerate(rank.chunks) for layer in chunk.layers}
    for chunk, layer in sorted(actions):
        if (chunk, layer) not in known:
            raise PlanError(f"The plan names layers.{layer} in chunk {chunk}, and no rank has it there. Plan for this model.")


class _Pipeline:
    """Ranks that run their passes when those of their neighbours are over.

    Args:
        ranks: All of them.
        runs: Each in its step.
        p2p_s: Seconds between the end of a pass and the start of what needs it.
    """

    def __init__(self, ranks: Sequence[RankModel], runs: Sequence[RankRun], p2p_s: float) -> None:
        self._passes = [rank.passes for rank in ranks]
        self._runs = runs
        self._p2p_s = p2p_s
        self._stages = len(ranks)
        self._virtual_stages = len(ranks) * len(ranks[0].chunks)
        self._next = [0] * len(ranks)
        """By rank: the pass that it runs next."""
        self._ends: dict[tuple[PassKind, int, int], float] = {}
        """By kind, virtual stage and microbatch: when its output is there for others."""

    def run(self) -> None:
        """Run all passes of all ranks.

        Raises:
            ConfigError: They wait for each other.
        """
        waiting = collections.deque(range(self._stages))
        while waiting:
            rank = waiting.popleft()
            while self._next[rank] < len(self._passes[rank]):
                one = self._passes[rank][self._next[rank]]
                stage = one.chunk * self._stages + rank
                ready_s = self._find_ready(one, stage)
                if ready_s is None:
                    break
                end_s = self._runs[rank].run_pass(one, ready_s=ready_s)
                self._next[rank] += 1
                self._ends[one.kind, stage, one.microbatch] = end_s + self._p2p_s
                follower = (stage + (1 if one.kind is PassKind.FORWARD else -1)) % self._stages
                if follower != rank:
                    waiting.append(follower)
        for rank, passes in enumerate(self._passes):
            if self._next[rank] < len(passes):
                raise ConfigError(
                    f"rank {rank} waits for ever before {passes[self._next[rank]]}: what it needs is on no other rank, or "
                    "behind what waits for this one. Give all ranks the passes of one pipeline."
                )

    def _find_ready(self, one: Pass, stage: int) -> float | None:
        """Return when the input of a pass is there, or None where that is not known yet."""
        if one.kind is PassKind.FORWARD:
            return 0.0 if stage == 0 else self._ends.get((PassKind.FORWARD, stage - 1, one.microbatch))
        if stage == self._virtual_stages - 1:
            return 0.0
        return self._ends.get((PassKind.BACKWARD, stage + 1, one.microbatch))
