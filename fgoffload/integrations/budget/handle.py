"""Handle of a model with a memory budget. Measures the model, makes a plan, and executes it.

[Note: Steps with a budget] The first step offloads every part, and reruns each layer right after its forward to measure it.
The second step follows a plan. If one of a plan's first three steps exceeds the budget, the handle corrects the plan. The
handle times the plan's 11th to 13th steps, since the engine still compares re-saved storages in earlier ones (see
`engine/saved_registry.py`). It corrects the planner's model with their peak and median time, and plans again, up to three times
or until a new plan is slower than the one before. Training then follows the fastest plan. In steps 16, 32, 64 and so on of any
plan, the handle measures the peak and corrects the plan if it exceeds the budget. All processes do this in the same steps,
because they exchange their readings. A forward whose input is larger than planned offloads everything. A single process
measures the model again in that forward. Several processes do so in the next compared step.
"""

import contextlib
import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from fgoffload.engine import Lane, TagStats, is_inert
from fgoffload.engine.identity import get_key
from fgoffload.engine.torch_internals import queue_after_backward, skip
from fgoffload.errors import BudgetError, ConfigError
from fgoffload.integrations.budget.layers import find_parts
from fgoffload.integrations.budget.loss import LossMeter
from fgoffload.integrations.budget.memory import Memory, PeakMeter, check_memory, find_budget, find_meter
from fgoffload.integrations.budget.plans import (
    BudgetPlan,
    Planner,
    StepReading,
    describe,
    make_first_plan,
    merge_blocks,
    merge_readings,
)
from fgoffload.integrations.budget.recompute import recompute
from fgoffload.integrations.budget.trial import REST, Measured, MeasuredBlock, State, Trial
from fgoffload.integrations.collectives import ask_first, gather, is_alone
from fgoffload.integrations.link import QUICK_SIZES, measure_link
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import KeptRun, PlainRun, find_running, has_hooks
from fgoffload.integrations.pytorch.model import ModelOffload
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.plan import Action, Site
from fgoffload.planner.ranks.measured_layers import LAYER, LAYER_INPUT
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

_OFFLOADS = (Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD)
_CHECKED_STEPS = 3
"""Number of steps at the start of a plan in which the peak is compared with the budget."""
_LAST_TIMED = 12
"""Step of a plan, counted from 0, after which peak and time are compared with the prediction."""
_TIMED_STEPS = 3
"""Number of timed steps, of which `_LAST_TIMED` is the last. Their median is used, because the CPU may delay some of them."""
_MAX_TRIALS = 3
"""Number of measured steps without a plan, after which a warning is logged."""
_MAX_CORRECTIONS = 3
"""Maximum number of times that a faster plan replaces a plan within the budget."""
_MIN_SPEEDUP = 0.005
"""A plan replaces another plan that fits the budget only if its predicted step is shorter by more than this fraction."""
_MIN_INPUT_FRACTION = 0.9
"""A step is compared with the prediction only if its input has at least this fraction of the planned input's elements."""
_RECOMPUTES = (Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD)
_SELECT = "Select modules instead of a memory budget."


class BudgetOffload(ModelOffload):
    """Handle of one model within a memory budget. Returned by `fgoffload.offload(model, memory=...)`."""

    def __init__(
        self, model: torch.nn.Module, memory: Memory, config: TransferConfig | None, *, device: DeviceChoice, reserve: Memory
    ) -> None:
        self._memory, self._reserve = memory, reserve
        self._reserve_bytes = check_memory(memory, reserve=reserve, device=device)
        self._budget_bytes = 0
        self.planned: BudgetPlan | None = None
        """Plan in use. None until the second step."""
        self._planner: Planner | None = None
        self._blocks: dict[int, MeasuredBlock] = {}
        self._shared: dict[tuple[int, str], bool] = {}
        """Results of `_shares_offloaded` for the plan, keyed by layer and tag."""
        self._gradient_bytes: dict[int, int] = {}
        self._fastest: BudgetPlan | None = None
        """Fastest plan so far that fits the budget."""
        self._trial: Trial | None = None
        self._meter: PeakMeter | None = None
        self._step = self._planned_at = self._corrections = 0
        self._measures = False
        """Whether this step reruns each layer to measure it."""
        self._planned_numel = self._tried_numel = self._numel = 0
        self._times_s: list[float] = []
        self._start_s, self._start_bytes = 0.0, 0
        self._loss: LossMeter | None = None
        """Loss meter of this step. None unless the step is compared or measured."""
        self._reading = StepReading(0)
        sites = find_parts(model)
        self._last_layer = max(site.layer for site in sites)
        super().__init__(model, sites, config, device=device)

    def is_made_with(self, memory: Memory, config: TransferConfig | None, *, device: DeviceChoice, reserve: Memory) -> bool:
        """Return whether this handle was created with the same arguments."""
        arguments = (memory, reserve, config or TransferConfig(), device)
        return arguments == (self._memory, self._reserve, self.config, self._device)

    def explain(self) -> str:
        """Return the plan as text, with its predictions and measurements."""
        if self.planned is None:
            return f"{self.name}: no plan yet. The first step measures the model, and the second step follows the plan."
        return describe(self.planned, budget_bytes=self._budget_bytes, reserve_bytes=self._reserve_bytes, name=self.name)

    def wrap(self, module: torch.nn.Module, forward: Callable[..., Any], inputs: Any, tag: str | None, layer: int) -> Any:
        """Return `forward` itself, or a wrapper that recomputes, measures or watches it."""
        if self._trial is not None and tag is not None and tag != LAYER:
            return functools.partial(self._trial.run_part, module, tag, forward)
        if self._trial is not None or is_inert():
            return forward
        if tag is None:
            self._begin_step(module, inputs)
            return functools.partial(self._watch, forward)
        if tag == LAYER and self._measures:
            forward = functools.partial(self._try_layer, module, forward, layer)
        elif self._find_action(layer, tag) in _RECOMPUTES:
            forward = functools.partial(recompute, forward)
        is_last = tag == LAYER and layer == self._last_layer and self._loss is not None
        return functools.partial(self._run_last_layer, forward) if is_last else forward

    @skip
    def is_idle(self, tag: str | None, layer: int) -> bool:
        """Return whether the plan keeps this part's activations on the GPU, and no hooks or observers are active."""
        if tag is None or self._trial is not None or has_hooks() or self.get_engine().observers:
            return False
        return not self._is_offloaded(layer, tag)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_run(self, module: torch.nn.Module, inputs: Any, tag: str | None, layer: int) -> Any:
        """Begin a region if the plan offloads this module. Otherwise, exclude its saved tensors from the enclosing region."""
        if self._trial is not None:
            return None
        if tag is None or is_inert() or self._is_offloaded(layer, tag):
            return super().begin_run(module, inputs, tag, layer)
        forward = find_running(self)
        if forward is None:
            return None
        if tag == LAYER:
            forward.announce_backward(find_tensor(inputs))
        if self.get_engine().observers or self._shares_offloaded(layer, tag):  # a ledger counts tensors in the hooks
            return KeptRun(forward)
        return PlainRun() if has_hooks() else None

    def _shares_offloaded(self, layer: int, tag: str) -> bool:
        """Return whether the module saves a storage that an offloaded part of the same layer saves too."""
        if self.planned is None:
            return True
        own = REST if tag == LAYER else tag
        found = self._shared.get((layer, own))
        if found is None:
            shared = {one for _, tags in self.planned.blocks[layer].storages if own in tags for one in tags} - {own}
            found = self._shared[layer, own] = any(self._find_action(layer, one) in _OFFLOADS for one in shared)
        return found

    def _find_action(self, layer: int, tag: str) -> Action:
        planned = self.planned
        if planned is None or self._numel > self._planned_numel or not planned.blocks[layer].is_measured:
            return Action.KEEP if tag == LAYER else Action.OFFLOAD
        return planned.plan.actions.get(Site(chunk=0, layer=layer, tag=tag), Action.KEEP)

    def _is_offloaded(self, layer: int, tag: str) -> bool:
        if tag != LAYER:
            return self._find_action(layer, tag) in _OFFLOADS
        # The region around a layer saves the tensors outside its parts, or the layer's input if the layer is recomputed.
        inner = LAYER_INPUT if self._find_action(layer, LAYER) in _RECOMPUTES else REST
        return self._find_action(layer, inner) in _OFFLOADS

    def _begin_step(self, model: torch.nn.Module, inputs: Any) -> None:
        engine = self.get_engine(inputs)
        if self._meter is None:
            if any(getattr(one, "gradient_checkpointing", False) is True for one in model.modules()):
                raise ConfigError(
                    f"memory: {self.name} uses gradient checkpointing, but fgoffload plans the recompute for a memory budget. "
                    "Call model.gradient_checkpointing_disable(), or set gradient_checkpointing=False in TrainingArguments."
                )
            self._meter = find_meter(engine, model)
            self._budget_bytes = find_budget(self._memory, reserve_bytes=self._reserve_bytes, device_type=engine.device.type)
        self._step += 1
        if self._is_compared(self._step - 1) or self._measures:
            self._compare(self._meter, has_gradients=_has_gradients(model))
        self._numel = sum(tensor.numel() for tensor in list_tensors(inputs))
        needs_trial = self.planned is None or self._numel > self._tried_numel
        if self._step == _MAX_TRIALS + 1 and self.planned is None:
            logger.warning(
                "%s has no plan after %d steps, since no backward reached a tensor that its forward returned. It offloads all "
                "layers, and measures them again in each step. Return tensors, or dataclasses, dicts, lists or tuples of them.",
                self.name,
                _MAX_TRIALS,
            )
        if self._step == 1 or (needs_trial and is_alone()):
            self._measures = True
        elif self._is_compared(self._step) and not is_alone():
            self._measures = any(gather(needs_trial))
        if self._measures:
            self._blocks.clear()
            self._gradient_bytes = {
                layer: self._meter.count_new_gradients(module)
                for find, tag, layer, _ in self._sites
                if tag == LAYER and (module := find()) is not None
            }
        self._loss = None
        if self._measures or self._is_compared(self._step):
            self._start_s = self._read_clock()
            self._start_bytes, _ = self._meter.read()
            self._meter.pop_peak()
            self._loss = LossMeter(engine.device, self._meter)
            self._reading = StepReading(0, has_gradients=_has_gradients(model))

    def _is_compared(self, step: int) -> bool:
        age = step - self._planned_at
        is_timed = _LAST_TIMED - _TIMED_STEPS < age <= _LAST_TIMED
        return age < _CHECKED_STEPS or is_timed or (age > _LAST_TIMED and age & (age - 1) == 0)

    def _read_clock(self) -> float:
        engine = self.get_engine()
        engine.device.synchronize(engine.device.record_event(engine.device.current_stream()))
        return time.perf_counter()

    def _watch(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Read the peak memory and the time at the end of its backward, before the optimizer runs."""
        meter, loss = self._meter, self._loss
        with contextlib.nullcontext() if meter is None or loss is None else meter.watch():
            output = forward(*args, **kwargs)
        self._end_forward(loss, output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_forward(self, loss: LossMeter | None, output: Any) -> None:
        """Cancel the last offloads, which backward would reload at once. If the plan says so, wait for earlier copies first."""
        if loss is not None and (tensors := [one for one in list_tensors(output) if one.requires_grad]):
            loss.record_end()
            register_multi_grad_hook(tensors, lambda _: queue_after_backward(self._end_step), mode="any")
        forward = find_running(self)
        if forward is not None and self.planned is not None:
            forward.expect_backward(window_bytes=self.planned.plan.loss_window_bytes)

    def _run_last_layer(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if self._loss is not None:
            self._loss.begin(output)
        return output

    def _end_step(self) -> None:
        if self._meter is not None and self._loss is not None:
            step_s = self._read_clock() - self._start_s
            self._reading = self._reading._replace(peak_bytes=self._meter.pop_peak(), step_s=step_s, loss=self._loss.read())

    @skip
    def _try_layer(self, module: torch.nn.Module, forward: Callable[..., Any], layer: int, /, *args: Any, **kwargs: Any) -> Any:
        before = State(module, (args, kwargs))
        output = forward(*args, **kwargs)
        model, meter = self._model(), self._meter
        if model is None or meter is None:
            return output
        parameters = {get_key(one) for one in (*model.parameters(), *module.parameters(), *module.buffers()) if not one.is_meta}
        with meter.excluded():
            self._trial = Trial(self.get_engine().device, module, parameters, meter.read)
            try:
                block = self._blocks[layer] = self._trial.run(forward, args, kwargs, output, before)
                block.gradient_bytes = self._gradient_bytes.get(layer, 0)
            finally:
                self._trial = None
        return output

    def _compare(self, meter: PeakMeter, *, has_gradients: bool) -> None:
        """Make a plan after a measured step, or correct it after a compared step. All processes must call this together."""
        readings = gather(self._reading)
        if min(one.peak_bytes for one in readings) == 0:
            return  # no backward followed; if this forward was measured, the next one is measured instead
        reading = merge_readings(readings)
        if self._measures:
            grown_bytes = max(gather(max(0, meter.read()[0] - self._start_bytes))) if self.planned is None else 0
            has_gradients = reading.has_gradients or any(gather(has_gradients))
            self._plan(reading._replace(peak_bytes=reading.peak_bytes + grown_bytes, step_s=0.0, has_gradients=has_gradients))
            return
        planned, planner = self.planned, self._planner
        if planned is None or planner is None or min(gather(self._numel)) < _MIN_INPUT_FRACTION * self._planned_numel:
            return
        age = self._step - 1 - self._planned_at
        if _LAST_TIMED - _TIMED_STEPS < age <= _LAST_TIMED:
            self._times_s.append(reading.step_s)
            reading = reading._replace(step_s=statistics.median(self._times_s))
        planned.measured = reading if age >= _LAST_TIMED else reading._replace(step_s=0.0)
        is_above = reading.peak_bytes > self._budget_bytes and not planned.is_best_effort
        if age == _LAST_TIMED:
            planned.peak_bytes, planned.step_s = planner.fit(planned.plan, reading)
        elif is_above:
            planner.fit(planned.plan, reading._replace(step_s=0.0))
        if is_above or (age == _LAST_TIMED and not planned.is_best_effort):
            self._plan_again(planned, planner, reading.peak_bytes)

    def _plan(self, reading: StepReading) -> None:
        numel = max(gather(self._numel))
        idle = MeasuredBlock("did not run", Measured(refusal="it did not run in the measured step"), {}, [])
        blocks = [self._blocks.get(number, idle) for number in range(self._last_layer + 1)]
        if not any(block.is_measured for block in blocks):
            measured = (block.whole.refusal for block in self._blocks.values())
            why = next(measured, None) or "the layers did not run, or ran inside their own checkpoint"
            fix = "Disable the key-value cache: model.config.use_cache = False." if "Cache" in why else _SELECT
            raise ConfigError(
                f"memory: no layer of {self.name} could be measured: {why}. A layer must do the same in every run. {fix}"
            )
        engine = self.get_engine()
        link = measure_link(engine.device, sizes=QUICK_SIZES).to_model()
        merged = merge_blocks(gather(blocks))
        planner = self._planner = Planner(
            merged,
            link=min(gather(link), key=lambda one: one.duplex_bytes_per_s),
            policy=self._policy,
            budget_bytes=min(gather(self._budget_bytes)),
            config=self.config,
        )
        planner.fit(make_first_plan(merged, self.config.min_offloaded_bytes), reading)
        planned = ask_first(planner.solve)
        self._measures, self._tried_numel, self._corrections, self._fastest = False, numel, 0, None
        if isinstance(planned, BudgetError):
            if self.planned is None:
                self.close()
                raise planned
            logger.warning("%s offloads all its activations, since an input is larger than planned: %s", self.name, planned)
            return
        self._planned_numel = numel
        self._policy = planner.policy
        engine.set_policy(self._policy)
        self._follow(planned)

    def _follow(self, planned: BudgetPlan, *, age: int = 0) -> None:
        """Follow a plan that has been in use for `age` steps. Above `_LAST_TIMED`, its first steps are not compared again."""
        self.planned, self._planned_at, self._times_s = planned, self._step - age, []
        self._shared.clear()
        logger.info("%s", self.explain())

    def _plan_again(self, planned: BudgetPlan, planner: Planner, peak_bytes: int) -> None:
        """Replace `planned` if its measured peak exceeds the budget, or if another plan is faster."""
        is_above, fastest = peak_bytes > self._budget_bytes, self._fastest
        if is_above:
            self._fastest = None if fastest is planned else fastest
        elif fastest is not None and fastest.step_s < planned.step_s:
            self._corrections = _MAX_CORRECTIONS
            logger.info("%s returns to an earlier plan, which was faster:", self.name)
            self._follow(fastest, age=_LAST_TIMED + 1)
            return
        else:
            self._fastest = planned
            if self._corrections >= _MAX_CORRECTIONS:
                return
        self._corrections += 1
        found = ask_first(planner.solve)
        if isinstance(found, BudgetError):
            planned.is_best_effort = is_above
            if is_above:
                logger.warning("%s continues with a plan that exceeds the budget: %s", self.name, found)
        elif is_above or found.step_s < (1 - _MIN_SPEEDUP) * planned.step_s:
            why = "exceeded the budget" if is_above else "can follow a faster plan"
            logger.info("%s %s (measured peak: %s). The new plan:", self.name, why, format_bytes(peak_bytes))
            self._follow(found)

    def _derive_policy(self, lane: Lane) -> None:
        """Derive the transfer policy until a plan exists. Later steps use the plan's policy."""
        if self.planned is None:
            super()._derive_policy(lane)

    def _warn_of_idle(self, tags: Mapping[str, TagStats]) -> None:
        """Do nothing, since the plan may keep all tensors of a tag."""


def _has_gradients(model: torch.nn.Module) -> bool:
    return any(one.grad is not None for one in model.parameters())
