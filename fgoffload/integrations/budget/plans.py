"""Plans which parts of measured layers to recompute or offload, and corrects plans with measurements of later steps."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fgoffload.errors import BudgetError, ConfigError
from fgoffload.integrations.budget.loss import LossReading
from fgoffload.integrations.budget.trial import REST, Measured, MeasuredBlock
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.measured_layers import LAYER, LAYER_INPUT, LayerPart, MeasuredLayer, make_rank
from fgoffload.planner.ranks.rank_model import LateCosts, LinkModel, NumberedLayer, RankModel
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.solver import solve
from fgoffload.transfer_config import TransferConfig
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import format_bytes, format_ms

_HEADROOM = 0.0075
"""Fraction of the budget that plans do not use, since peaks vary with the speed of the CPU. In
docs/results/huggingface.md, a plan for 16 GiB had a peak of up to 16.03 GiB."""
_SAFETY = 1.05
"""If no plan fits, the error suggests the smallest plan's predicted peak times this factor as the budget. The first prediction
counts the memory of the loss as static, and was up to 4% too low."""

_LATE = LateCosts(group_s=2e-4, tensor_s=1e-4)
"""Assumed CPU time per offloaded group and tensor. In launch-bound parts of a step, the GPU waits for it. Without this cost,
plans prefer many small groups. Source: profiles of steps on slow hosts in docs/results/huggingface.md; on fast hosts, half."""


class StepReading(NamedTuple):
    """Peak memory and time of a forward and its backward in one process."""

    peak_bytes: int
    step_s: float = 0.0
    """0 if not measured. The times of `loss` are then invalid too."""
    loss: LossReading = LossReading()
    has_gradients: bool = False
    """Whether gradients existed before the step."""


def merge_readings(readings: Sequence[StepReading]) -> StepReading:
    """Return the maximum of each value over all processes."""
    peaks, times, losses, has_gradients = zip(*readings, strict=True)
    return StepReading(max(peaks), max(times), LossReading(*map(max, zip(*losses, strict=True))), any(has_gradients))


@dataclasses.dataclass(slots=True, kw_only=True)
class BudgetPlan:
    """Plan with the predicted peak memory and time of a step."""

    plan: OffloadPlan
    peak_bytes: int
    step_s: float
    blocks: tuple[MeasuredBlock, ...]
    measured: StepReading | None = None
    """Reading of the plan's last compared step. Its `step_s` is 0 until all timed steps are done."""
    is_best_effort: bool = False
    """Whether the plan exceeded the budget, and no plan that fits was found."""


class Planner:
    """Plans one model with measured `blocks` for one budget. The budget limits the bytes that the allocator counts."""

    def __init__(
        self,
        blocks: Sequence[MeasuredBlock],
        *,
        link: LinkModel,
        policy: TransferPolicy,
        budget_bytes: int,
        config: TransferConfig,
    ) -> None:
        self._blocks = tuple(blocks)
        self._budget_bytes = budget_bytes
        layers = _make_layers(blocks, config.min_offloaded_bytes)
        # The planner treats a part as one group, which must fit into the window and is prefetched as a whole.
        largest_bytes = max(
            sum(one.size_bytes for one in layer.tensors if part.name in one.tags) for layer in layers for part in layer.parts
        )
        self.policy = TransferPolicy(
            window_bytes=max(policy.window_bytes, largest_bytes), prefetch_bytes=max(policy.prefetch_bytes, largest_bytes)
        )
        """Window and prefetch sizes of the simulation. The plan must run with the same sizes."""
        self._layers, self._link, self._host_budget_bytes = layers, link, config.host_budget_bytes
        self._loss, self._between_s, self._end_s, self._static_bytes = LossReading(), 0.0, 0.0, 0
        self._rank = self._make_rank()

    def fit(self, plan: OffloadPlan, reading: StepReading) -> tuple[int, float]:
        """Fit the loss, the static memory and the time outside the layers to `reading`, measured in a step that follows `plan`.

        A `reading` without a time affects only the memory. Returns the corrected prediction: peak bytes and seconds.
        """
        if reading.has_gradients:
            self._layers = [dataclasses.replace(layer, gradient_bytes=0) for layer in self._layers]
        if reading.step_s:
            self._loss, self._between_s, self._end_s = reading.loss, 0.0, 0.0
            self._between_s = max(0.0, reading.step_s - simulate([self._make_rank()], plan).step_s)
            self._end_s = max(0.0, reading.step_s - simulate([self._make_rank()], plan).step_s)
        else:
            self._loss = reading.loss._replace(forward_s=self._loss.forward_s, backward_s=self._loss.backward_s)
        found = simulate([self._make_rank()], plan)
        self._static_bytes = max(0, self._static_bytes + reading.peak_bytes - found.peak_bytes)
        self._rank = self._make_rank()
        return reading.peak_bytes, found.step_s

    def _make_rank(self) -> RankModel:
        """Return a rank model with the layers, followed by the loss as a layer without saved tensors."""
        rank = make_rank(
            self._layers,
            link=self._link,
            static_bytes=self._static_bytes,
            policy=self.policy,
            host_budget_bytes=self._host_budget_bytes,
        )
        chunk = rank.chunks[0].replace_models(self._add_time_between)
        segment = Segment(name="loss", **self._loss._asdict())
        loss = NumberedLayer(number=len(chunk.layers), model=LayerModel(kind="loss", segments=(segment,), tensors=()))
        return dataclasses.replace(
            rank,
            chunks=(dataclasses.replace(chunk, layers=(*chunk.layers, loss)),),
            min_offloaded_numel=0,
            step_end_s=self._end_s,
            late=_LATE,
        )

    def _add_time_between(self, model: LayerModel) -> LayerModel:
        """Add a layer's share of the time between layers, for example for FSDP's copies, to its last segment."""
        part = self._between_s / sum(sum(one.forward_s + one.backward_s for one in layer.parts) for layer in self._layers)
        *others, last = model.segments
        last = dataclasses.replace(
            last, forward_s=last.forward_s + part * model.forward_s, backward_s=last.backward_s + part * model.backward_s
        )
        return dataclasses.replace(model, segments=(*others, last))

    def solve(self) -> BudgetPlan | BudgetError:
        """Return the fastest plan that fits the budget, or an error with the smallest feasible budget."""
        try:
            solution = solve([self._rank], budget_bytes=round((1 - _HEADROOM) * self._budget_bytes))
        except BudgetError as error:
            why = f"memory {format_bytes(self._budget_bytes)} is too small even with recompute and offload."
            return BudgetError(why, round(_SAFETY * error.least_bytes))
        result = solution.result
        return BudgetPlan(plan=solution.plan, peak_bytes=result.peak_bytes, step_s=result.step_s, blocks=self._blocks)


def make_first_plan(blocks: Sequence[MeasuredBlock], min_offloaded_bytes: int) -> OffloadPlan:
    """Return the plan of the measured step, which offloads every storage of at least `min_offloaded_bytes` in all layers."""
    return OffloadPlan(
        actions={
            Site(chunk=0, layer=number, tag=tag): Action.OFFLOAD
            for number, block in enumerate(blocks)
            for size, tags in block.storages
            for tag in tags
            if size >= min_offloaded_bytes and tag != LAYER_INPUT
        }
    )


def merge_blocks(ranks: Sequence[Sequence[MeasuredBlock]]) -> list[MeasuredBlock]:
    """Merge the layers of all processes. Each time and size is the maximum over the processes.

    A part that one process cannot recompute is never recomputed, and a layer that one process could not measure counts as not
    measured. Raises `ConfigError` if the processes have different layers.
    """
    layers = list(itertools.zip_longest(*ranks))
    if any(None in same or len({(one.name, *one.parts) for one in same if one.is_measured}) > 1 for same in layers):
        raise ConfigError("memory: the processes measured different layers. Use the same model in all processes.")
    return [next((one for one in same if not one.is_measured), None) or _merge(same, max) for same in layers]


def _merge(same: Sequence[MeasuredBlock], choose: Callable[[list[float]], float]) -> MeasuredBlock:
    first = same[0]
    sizes: dict[tuple[tuple[str, ...], int], int] = {}
    for one in same:  # with experts, the number of storages may differ between processes
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        for size, tags in one.storages:
            counts[tags] += 1
            key = (tags, counts[tags])
            sizes[key] = max(size, sizes.get(key, 0))
    return MeasuredBlock(
        first.name,
        _merge_parts([one.whole for one in same], choose),
        {tag: _merge_parts([one.parts[tag] for one in same], choose) for tag in first.parts},
        [(size, tags) for (tags, _), size in sizes.items()],
        max(one.gradient_bytes for one in same),
    )


def _merge_parts(same: Sequence[Measured], choose: Callable[[list[float]], float]) -> Measured:
    return Measured(
        forward_s=choose([one.forward_s for one in same]),
        backward_s=choose([one.backward_s for one in same]),
        backward_extra_bytes=max(one.backward_extra_bytes for one in same),
        input=same[0].input,
        refusal=next((one.refusal for one in same if one.refusal is not None), None),
    )


def _make_layers(blocks: Sequence[MeasuredBlock], min_offloaded_bytes: int) -> list[MeasuredLayer]:
    """Convert `blocks` to the planner's layers. Layers that save the same storages become one kind, with median times."""
    alike: dict[object, list[MeasuredBlock]] = {}
    keys = []
    for block in blocks:
        refused = tuple((tag, part.refusal) for tag, part in block.parts.items())
        kept = (block.whole.refusal, block.whole.input, block.gradient_bytes)
        keys.append((block.name, tuple(block.storages), refused, kept))
        alike.setdefault(keys[-1], []).append(block)
    made = {
        key: _make_layer(_merge(same, statistics.median), number, min_offloaded_bytes)
        for number, (key, same) in enumerate(alike.items())
    }
    return [made[key] for key in keys]


def _make_layer(block: MeasuredBlock, number: int, min_offloaded_bytes: int) -> MeasuredLayer:
    whole, parts = block.whole, block.parts
    parts[REST] = Measured(
        forward_s=max(0.0, whole.forward_s - sum(part.forward_s for part in parts.values())),
        backward_s=max(0.0, whole.backward_s - sum(part.backward_s for part in parts.values())),
        refusal="it has no module of its own",
    )
    tensors = [
        SavedTensor(name=f"t{n}", tags=tags, size_bytes=size, stays=size < min_offloaded_bytes)
        for n, (size, tags) in enumerate(block.storages)
    ]
    return MeasuredLayer(
        kind=f"{block.name}_{number}",
        parts=tuple(
            LayerPart(
                name=tag,
                forward_s=part.forward_s,
                backward_s=part.backward_s,
                backward_extra_bytes=part.backward_extra_bytes,
                input=None if part.refusal is not None or part.input is None else tensors[part.input],
            )
            for tag, part in parts.items()
        ),
        # A storage that is only an input of a part or layer is saved only if that part or layer is recomputed.
        tensors=tuple(tensor for tensor in tensors if tensor.tags and tensor.tags != (LAYER_INPUT,)),
        input=None if whole.refusal is not None or whole.input is None else tensors[whole.input],
        gradient_bytes=block.gradient_bytes,
    )


def describe(planned: BudgetPlan, *, budget_bytes: int, reserve_bytes: int, name: str) -> str:
    """Return the plan as text: one line per layer, then predictions and measurements."""
    reserved = f", with a reserve of {format_bytes(reserve_bytes)}" if reserve_bytes else ""
    lines = [f"plan for {name}: at most {format_bytes(budget_bytes)}{reserved}"]
    for number, block in enumerate(planned.blocks):
        acts = {site.tag: action.value for site, action in planned.plan.actions.items() if site.layer == number}
        saved = sum(size for size, tags in block.storages if tags and tags != (LAYER_INPUT,))
        chosen = ", ".join(f"{tag}: {act}" for tag, act in acts.items()) or "keep"
        chosen = chosen if block.is_measured else "offload, since it could not be measured"
        lines.append(f"  layer {number} ({block.name}), {format_bytes(saved)} saved: {chosen}")
    named = [(tag, part) for block in planned.blocks for tag, part in ((LAYER, block.whole), *block.parts.items())]
    lines += dict.fromkeys(f"  {tag} cannot be recomputed: {part.refusal}" for tag, part in named if part.refusal is not None)
    read = planned.measured
    is_settled = read is not None and read.step_s > 0
    where = "forward and backward" if is_settled else "forward and backward of the layers"
    lines.append(f"predicted: {format_ms(planned.step_s)} for {where}, {format_bytes(planned.peak_bytes)} at peak")
    if read is not None:
        later = "no time yet (steps 11 to 13 of the plan will be timed)"
        time = f"{format_ms(read.step_s)} for forward and backward" if is_settled else later
        lines.append(f"measured: {time}, {format_bytes(read.peak_bytes)} at peak")
    return "\n".join(lines)
