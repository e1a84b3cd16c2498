"""`--offload-modules auto`: the first step measures, the others keep to the budget, and every bit stays."""

import contextlib
import dataclasses
import functools
import logging

import pytest
from support.pipeline import Training, run_pipeline, run_trainings
from support.toy_ranks import make_toy_layer, make_toy_rank
from support.trainings import DENSE, HIDDEN_BYTES, MIXED, MOE, SHARED, make_trainer, train

from fgoffload import Action, IntegrationError, OffloadConfig, OffloadPlan, PlanError, Site
from fgoffload.engine import ActivationLedger
from fgoffload.engine.device import CpuDevice
from fgoffload.integrations.megatron import auto, measured_layers, measured_plans, profiling
from fgoffload.integrations.megatron.device_memory import MemoryReading
from fgoffload.integrations.megatron.plan_trial import StepTimes
from fgoffload.integrations.megatron.profiling import MeasurementState
from fgoffload.integrations.megatron.schedule_call import ScheduleCall
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.planner import host_slowdown
from fgoffload.planner.host_slowdown import MOST_SLOWDOWN
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, Turn
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving import solver
from fgoffload.planner.solving.megatron_flags import MegatronFlags
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import RankProfile
from fgoffload.policy import TransferPolicy, count_budget_bytes
from fgoffload.tags import default_tags
from fgoffload.units import GIB, format_bytes

pytestmark = pytest.mark.usefixtures("parallel")

NORMED = MIXED.replace("--normalization RMSNorm", "")
MODELS = {"dense and experts": MIXED, "layer norm": NORMED, "experts": SHARED}


def make_auto(budget_bytes, **options):
    options.setdefault("min_offloaded_tensor_size", 16)
    options.setdefault("offload_window_bytes", 16 * 1024)
    options.setdefault("offload_prefetch_bytes", 16 * 1024)
    return OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=budget_bytes, **options)


@dataclasses.dataclass
class Steps:
    """What some steps did."""

    bits: list = dataclasses.field(default_factory=list)
    moved: list = dataclasses.field(default_factory=list)
    activation_bytes: list = dataclasses.field(default_factory=list)
    """At peak, of each step."""
    planned: list = dataclasses.field(default_factory=list)
    """The plan in use after each step."""
    runs_again: list = dataclasses.field(default_factory=list)
    """Layers whose core attention ran again, of each step."""


def run(flags, config, *, steps=3, changes=None):
    """Train, each step with the arguments that `changes` has for it, and return what the steps did."""
    found = Steps()
    with make_trainer(flags, config) as trainer:
        for step in range(steps):
            trainer.arguments = dataclasses.replace(trainer.arguments, **(changes or {}).get(step, {}))
            ledger = ActivationLedger(parameters=trainer.parameters())
            with trainer.observe(ledger):
                result = trainer.run_step()
            found.bits.append((result.losses, result.gradient_digests))
            found.activation_bytes.append(ledger.peak_bytes)
            if config is not None:
                found.moved.append(trainer.integration.last_step.d2h_bytes)
                found.planned.append(trainer.integration.measurement.planned)
                layers = trainer.chunks[0].decoder.layers
                found.runs_again.append(sum(bool(layer.self_attention.checkpoint_core_attention) for layer in layers))
    return found


def count_static(flags):
    """Return the bytes of parameters and gradients, in fp32."""
    with make_trainer(flags, None) as trainer:
        return sum(parameter.numel() * 2 * 4 for parameter in trainer.parameters())


@pytest.fixture(scope="module", params=MODELS)
def model(request, parallel):
    flags = MODELS[request.param]
    return flags, run(flags, None, steps=4), count_static(flags)


def test_every_step_has_the_same_bits_and_all_but_the_first_keep_to_the_budget(model):
    flags, expected, static_bytes = model
    budget_bytes = static_bytes + int(0.5 * expected.activation_bytes[1])
    found = run(flags, make_auto(budget_bytes), steps=4)
    assert found.bits == expected.bits
    for step in range(1, 4):
        assert found.moved[step] > 0
        assert static_bytes + found.activation_bytes[step] <= budget_bytes
        predicted_bytes = found.planned[step].peak_bytes - static_bytes
        # Copies of the CPU are done at once, and those of the simulator take time, in which both sides hold the bytes.
        assert 0.6 * predicted_bytes <= found.activation_bytes[step] <= 1.03 * predicted_bytes


def test_the_host_of_a_dense_model_is_beside_compute_where_it_is_the_device():
    expected, static_bytes = run(DENSE, None), count_static(DENSE)
    budget_bytes = static_bytes + int(0.7 * expected.activation_bytes[1])
    # A window larger than all that leaves: a host ahead of its device would hold it all, and no budget would be kept.
    found = run(DENSE, make_auto(budget_bytes, offload_window_bytes=GIB))
    assert found.bits == expected.bits
    assert found.moved[1] > 0
    assert found.planned[1].plan.count(Action.OFFLOAD) > 0


def test_a_budget_for_all_moves_nothing_and_is_predicted(model):
    flags, expected, static_bytes = model
    found = run(flags, make_auto(static_bytes + 2 * expected.activation_bytes[1]), steps=3)
    assert found.bits == expected.bits[:3]
    assert found.moved == [0, 0, 0]
    assert found.planned[0] is None
    assert found.planned[1].plan == OffloadPlan(actions={})
    predicted_bytes = found.planned[1].peak_bytes - static_bytes
    # What autograd saves outside of the model, in the loss function, is not seen: a few bytes a token.
    assert found.activation_bytes[1] == pytest.approx(predicted_bytes, rel=0.03)


def test_a_first_step_that_would_not_fit_leaves_while_it_is_measured(model):
    flags, expected, static_bytes = model
    roomy = run(flags, make_auto(static_bytes + 4 * expected.activation_bytes[1]), steps=1)
    tight = run(flags, make_auto(static_bytes + int(0.5 * expected.activation_bytes[1])), steps=1)
    assert roomy.moved[0] == 0
    assert tight.moved[0] > 0
    assert tight.activation_bytes[0] < roomy.activation_bytes[0]
    assert tight.bits == roomy.bits == expected.bits[:1]


def choose(monkeypatch, make_actions):
    """Let the solver choose what `make_actions` returns for a layer: actions by tag or unit."""
    real = solver.solve
    chosen = {}

    def solve(ranks, *, budget_bytes, **options):
        solution = real(ranks, budget_bytes=2**50)
        for rank in ranks:
            for number, chunk in enumerate(rank.chunks):
                for layer in chunk.layers:
                    for name, action in make_actions(layer.model).items():
                        chosen[Site(chunk=number, layer=layer.number, tag=name)] = action
        return dataclasses.replace(solution, plan=OffloadPlan(actions=chosen))

    monkeypatch.setattr(solver, "solve", solve)
    return chosen


SMALL_UNITS = ("attn_norm", "mlp_norm", "core_attn", "mlp", "shared_expert")


@pytest.mark.parametrize(
    "units",
    [SMALL_UNITS, (*SMALL_UNITS[:3], "mlp", "moe"), ("layer",), ("qkv_linear", "mlp_fc1", "attn_norm", "mlp_norm")],
    ids=" ".join,
)
@pytest.mark.parametrize("flags", [MIXED, NORMED], ids=["RMS norm", "layer norm"])
def test_whatever_is_offered_to_run_again_keeps_every_bit(units, flags, monkeypatch):
    # All that may run again does: norms of plain ops too, around which Megatron's own recompute changes the order of sums.
    chosen = choose(monkeypatch, lambda layer: {unit.name: Action.RECOMPUTE for unit in layer.units if unit.name in units})
    found = run(flags, make_auto(2**40))
    assert found.bits == train(flags, steps=3)[0]
    offered = {site.tag for site in chosen}
    assert offered
    assert ("attn_norm" in offered) == (units != ("layer",))
    assert found.activation_bytes[2] < found.activation_bytes[0]


def test_a_layer_that_runs_again_may_send_its_input_away(monkeypatch):
    choose(monkeypatch, lambda layer: {"layer": Action.RECOMPUTE, "layer_input": Action.OFFLOAD})
    flags = NORMED.replace("--position-embedding-type rope", "")
    found = run(flags, make_auto(2**40, min_offloaded_tensor_size=2048))
    assert found.bits == train(flags, steps=3)[0]
    assert found.moved == [0, *[2 * 2 * HIDDEN_BYTES] * 2]  # layers and microbatches


def test_more_microbatches_are_planned_for_before_they_run(caplog, model):
    flags, _, static_bytes = model
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.megatron.auto")
    changes = {2: {"global_batch_size": 8}, 3: {"global_batch_size": 2}}
    expected = run(flags, None, steps=4, changes=changes)
    budget_bytes = static_bytes + int(0.7 * expected.activation_bytes[0])
    found = run(flags, make_auto(budget_bytes), steps=4, changes=changes)
    assert found.bits == expected.bits
    assert [planned and planned.call.microbatches for planned in found.planned] == [None, 2, 4, 4]
    lines = [record.message for record in caplog.records if "beyond" in record.message]
    assert lines == ["a step of 4 microbatches of 64 tokens is beyond the plan for 2 microbatches of 64 tokens: planning again"]


def test_longer_sequences_are_measured_and_planned_for(caplog):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.megatron.auto")
    changes = {2: {"seq_length": 64}}
    flags = f"{MIXED} --max-position-embeddings 64"
    expected = run(flags, None, steps=5, changes=changes)
    budget_bytes = count_static(flags) + int(0.7 * expected.activation_bytes[3])
    found = run(flags, make_auto(budget_bytes), steps=5, changes=changes)
    assert found.bits == expected.bits
    assert [planned and planned.call.tokens for planned in found.planned] == [None, 64, None, 128, 128]
    assert sum("beyond" in record.message for record in caplog.records) == 1
    assert count_static(flags) + max(found.activation_bytes[3:]) <= budget_bytes


def test_a_budget_below_what_is_there_all_the_time_names_both():
    static_bytes = count_static(MOE)
    with pytest.raises(
        PlanError, match=f"--offload-memory-budget {format_bytes(static_bytes // 2)}: .* not above the static memory"
    ) as caught:
        run(MOE, make_auto(static_bytes // 2), steps=2)
    assert "Give a budget of" in str(caught.value)


def test_a_budget_that_no_plan_meets_says_how_much_is_missing():
    static_bytes = count_static(MOE)
    with pytest.raises(PlanError, match=r"lacks [\d.]+ KiB at .* Give a budget of \d+B or more"):
        run(MOE, make_auto(static_bytes + 50_000), steps=2)


def test_megatrons_recompute_flags_are_refused():
    config = make_auto(2**40)
    flags = f"{MOE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    with pytest.raises(IntegrationError, match="--offload-modules auto chooses what runs again, layer by layer"):
        run(flags, config, steps=1)


def test_remove_lets_the_layers_run_once_again(monkeypatch):
    choose(monkeypatch, lambda layer: {"core_attn": Action.RECOMPUTE})
    with make_trainer(MIXED, make_auto(2**40)) as trainer:
        attention = trainer.chunks[0].decoder.layers[0].self_attention
        trainer.run_step()
        assert not attention.checkpoint_core_attention
        trainer.run_step()
        assert attention.checkpoint_core_attention
        trainer.integration.remove()
        assert not attention.checkpoint_core_attention
        assert not attention.core_attention._forward_pre_hooks


class CountedMemory:
    """In place of an allocator: what a step takes is what it was predicted to take, and so much more."""

    def __init__(self, static_bytes):
        self.static_bytes = static_bytes
        self.trainer = None
        self.beyond = []
        """By plan: bytes that its steps take beyond their prediction. The last one goes for all later plans."""
        self.plans = []
        self.allocated = None
        """What is on the device in a step that is measured again, where that differs."""

    def count_allocated(self):
        return self.allocated if self.plans and self.allocated is not None else self.static_bytes

    def read(self):
        return MemoryReading(allocated_bytes=self.static_bytes, peak_bytes=self.static_bytes)

    def take_peak(self):
        return self.static_bytes

    def count_peak(self):
        planned = self.trainer.integration.measurement.planned
        if planned not in self.plans:
            self.plans.append(planned)
        return planned.peak_bytes + self.beyond[min(self.plans.index(planned), len(self.beyond) - 1)]


def run_counted(monkeypatch, caplog, beyond, *, part=0.7, steps=6, changes=None, allocated_part=None):
    """Train where steps take `beyond` bytes more than predicted; return the steps, the budget and what was logged about it."""
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.megatron.auto")
    static_bytes = count_static(MIXED)
    memory = CountedMemory(static_bytes)
    memory.beyond = beyond
    monkeypatch.setattr(profiling, "find_device_memory", lambda device_type: memory)
    expected = run(MIXED, None, steps=steps, changes=changes)
    budget_bytes = static_bytes + int(part * max(expected.activation_bytes))
    memory.allocated = None if allocated_part is None else int(allocated_part * budget_bytes)
    make = make_trainer

    @contextlib.contextmanager
    def make_and_keep(*args):
        with make(*args) as memory.trainer:
            yield memory.trainer

    monkeypatch.setitem(globals(), "make_trainer", make_and_keep)
    found = run(MIXED, make_auto(budget_bytes), steps=steps, changes=changes)
    assert found.bits == expected.bits
    lines = [(record.levelname, record.message) for record in caplog.records if "above the budget" in record.message]
    return found, budget_bytes, lines


def test_a_step_that_takes_more_than_the_budget_is_planned_for_again(monkeypatch, caplog):
    found, budget_bytes, lines = run_counted(monkeypatch, caplog, [30_000, 70_000])
    # Measured, planned, and twice planned again with what was missing left free.
    assert found.planned[1].peak_bytes + 30_000 > budget_bytes
    assert found.planned[2].peak_bytes <= budget_bytes - 30_000
    assert found.planned[2].peak_bytes + 70_000 > budget_bytes
    assert found.planned[3].peak_bytes <= budget_bytes - 70_000
    assert found.planned[3] is found.planned[4] is found.planned[5]
    assert [level for level, _ in lines] == ["INFO", "INFO"]
    above_bytes = found.planned[1].peak_bytes + 30_000 - budget_bytes
    assert f"{format_bytes(above_bytes)} above the budget" in lines[0][1]


def test_a_step_within_the_budget_keeps_its_plan_and_is_not_looked_at_again(monkeypatch, caplog):
    found, budget_bytes, lines = run_counted(monkeypatch, caplog, [10])
    assert found.planned[1].peak_bytes + 10 <= budget_bytes
    assert found.planned[1] is found.planned[5]
    assert lines == []


def test_after_a_few_plans_the_last_one_stays_with_a_warning(monkeypatch, caplog):
    found, _, lines = run_counted(monkeypatch, caplog, [20_000, 40_000, 60_000, 80_000], part=0.8, steps=7)
    assert found.planned[1] is not found.planned[2] is not found.planned[3]
    assert found.planned[3] is found.planned[6]
    assert [level for level, _ in lines] == ["INFO", "INFO", "WARNING"]
    assert "after 3 plans: the last one stays. Give a budget that much smaller." in lines[2][1]


def test_where_no_other_plan_is_found_the_first_stays_with_a_warning(monkeypatch, caplog):
    found, _, lines = run_counted(monkeypatch, caplog, [10**9])
    assert found.planned[1] is found.planned[5]
    assert [level for level, _ in lines] == ["INFO", "WARNING"]
    assert "its plan stays: no other one was found." in lines[1][1]


def test_a_step_that_is_smaller_than_planned_says_nothing(monkeypatch, caplog):
    changes = {1: {"global_batch_size": 2}, 3: {"global_batch_size": 4}}
    found, _, lines = run_counted(monkeypatch, caplog, [30_000, 0], changes=changes)
    # The second and the third step are half as large: only the fourth is one that the plan is for.
    assert found.planned[1] is found.planned[3]
    assert found.planned[4] is not found.planned[3]
    assert len(lines) == 1


def test_one_process_above_the_budget_is_enough_for_all_to_plan_again(monkeypatch, caplog):
    gathered = []

    def gather(own):
        gathered.append(own)
        is_taken = hasattr(own, "beyond_bytes")
        other = dataclasses.replace(own, peak_bytes=2**50, beyond_bytes=25_000) if is_taken and len(gathered) == 2 else own
        return [own, other]

    monkeypatch.setattr(auto, "gather", gather)
    found, budget_bytes, lines = run_counted(monkeypatch, caplog, [0])
    assert found.planned[2].peak_bytes <= budget_bytes - 25_000 < found.planned[1].peak_bytes
    assert len(lines) == 1
    assert len(gathered) == 3  # what was measured, and the first steps of two plans


PIPELINE = f"{MOE} --num-layers 4 --global-batch-size 8 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"
AUTO_FLAGS = "--fine-grained-activation-offloading --offload-modules auto --min-offloaded-tensor-size 16"


LAYOUTS = {
    "1F1B": (PIPELINE, "1400KiB"),
    "interleaved": (f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1", "1500KiB"),
    "two copies with experts of their own": (f"{MOE} --global-batch-size 8 --expert-model-parallel-size 2", "700KiB"),
}


@pytest.mark.parametrize(("flags", "budget"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_processes_plan_together_and_keep_their_bits(flags, budget):
    small = "--offload-window 16KiB --offload-prefetch 16KiB"
    argv = f"{flags} {AUTO_FLAGS} {small} --offload-memory-budget {budget}".split()
    training = Training(tuple(argv), steps=3, sets_weights=True)
    expected, found = run_trainings([training, dataclasses.replace(training, offload=True)], processes=2)
    assert [(stage.losses, stage.gradient_digests) for stage in found] == [
        (stage.losses, stage.gradient_digests) for stage in expected
    ]
    # The first stage has two microbatches in flight, and needs the room more.
    assert sum(found[0].transfers.values()) > 0


def test_whatever_keeps_the_first_process_from_planning_is_told_to_all(monkeypatch):
    def solve(models, **options):
        raise ValueError("bounds cross")

    sent = []
    monkeypatch.setattr(solver, "solve", solve)
    monkeypatch.setattr(auto, "broadcast", lambda found: sent.append(found) or found)
    with make_trainer(MODELS["dense and experts"], make_auto(2**40)) as trainer:
        trainer.run_step()
        with pytest.raises(PlanError, match="the first process could not plan: ValueError: bounds cross") as raised:
            trainer.run_step()
    assert sent == [str(raised.value)]
    assert isinstance(raised.value.__cause__, ValueError)


def test_two_pipeline_ranks_raise_the_same():
    argv = f"{PIPELINE} {AUTO_FLAGS} --offload-memory-budget 100KiB".split()
    with pytest.raises(
        AssertionError, match=r"PlanError: --offload-memory-budget 100.00 KiB: .* static memory of pipeline rank"
    ):
        run_pipeline(argv, processes=2, steps=2, offload=True)


class OwnHost:
    """A training whose host is not its device: each step takes what `seconds` say of the first plan, or of the second.

    A step of the model takes a few milliseconds by what is measured, and seconds by this clock.
    """

    def __init__(self, monkeypatch, caplog, seconds, *, first=None, second=None):
        self.asked = []
        """What was to be left free, of each plan, and what compute takes longer beside copies, as a part."""
        self.measured = []
        """The steps that were measured, from 0, and the layers that were to stay, by chunk and number, where it was known."""
        self.steps = 0
        self._now_s = 0.0
        self._seconds = seconds
        self._first = first
        """What the first plan does, where that is not what the solver finds."""
        self._second = second
        """What the second plan does, or why there is none; None where it does what the first does."""
        self._solve = solver.solve_leaving_free
        self._caplog = caplog
        self._monkeypatch = monkeypatch
        self._measurement = None
        options = {"clock": self._read_clock, "has_own_host": True}
        monkeypatch.setattr(auto, "AutoOffload", functools.partial(auto.AutoOffload, **options))
        monkeypatch.setattr(solver, "solve_leaving_free", self._plan)
        # Copies of so small a model are short beside its compute on a CPU, and a clock that is no clock has no noise.
        monkeypatch.setattr(host_slowdown, "LEAST_EFFECT", 1e-9)

    def _read_clock(self):
        """A step is over: it took its time."""
        planned = self._measurement.planned
        self._now_s += self._seconds[int(self._has_second(planned))] if planned is not None else 0.0
        return self._now_s

    def _has_second(self, planned):
        return planned.measured_step > 1

    def _plan(self, ranks, *, free_bytes, **options):
        self.asked.append((free_bytes, ranks[0].link.compute_slowdown))
        is_second = self._measurement._rival is not None
        if is_second and isinstance(self._second, Exception):
            raise self._second
        solution = self._solve(ranks, free_bytes=free_bytes, **options)
        if not is_second:
            self.actions = solution.plan.actions if self._first is None else self._first
        actions = self._second if is_second and self._second is not None else self.actions
        return dataclasses.replace(solution, plan=dataclasses.replace(solution.plan, actions=actions))

    def run(self, *, beyond=(0,), steps=13, **options):
        """Train; return the steps, the plan of each, and what was logged of which plan stays."""
        make = make_trainer
        run_step = Trainer.run_step

        def count_step(trainer, *args, **kwargs):
            result = run_step(trainer, *args, **kwargs)
            if self._measurement is not None and self._measurement.state is MeasurementState.RECORDED:
                self.measured.append((self.steps, self._measurement._staying))
            self.steps += self._measurement is not None
            return result

        @contextlib.contextmanager
        def make_and_keep(flags, config):
            with make(flags, config) as trainer:
                self._measurement = trainer.integration and trainer.integration.measurement
                yield trainer

        self._monkeypatch.setattr(Trainer, "run_step", count_step)
        self._monkeypatch.setitem(globals(), "make_trainer", make_and_keep)
        found, _, _ = run_counted(self._monkeypatch, self._caplog, list(beyond), steps=steps, **options)
        return found, [record.message for record in self._caplog.records if "stays" in record.message]


ONE_LEAVES = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}
ONE_RUNS_AGAIN = {Site(chunk=0, layer=0, tag="core_attn"): Action.RECOMPUTE}


@pytest.mark.parametrize(("second_s", "stays"), [(0.5, "second"), (1.0, "first")])
def test_a_few_steps_say_which_of_two_plans_stays(monkeypatch, caplog, second_s, stays):
    host = OwnHost(monkeypatch, caplog, (1.0, second_s), second=ONE_RUNS_AGAIN)
    found, lines = host.run()
    # Measured; a first step and three timed ones by the plan; measured again; as many by another plan; then the better one.
    first, second = found.planned[1], found.planned[6]
    expected = [first] * 4 + [None] + [second] * 4 + [second if stays == "second" else first] * 3
    assert found.planned[1:] == expected
    assert [step for step, _ in host.measured] == [0, 5]
    assert (first.measured_step, second.measured_step) == (1, 6)
    assert second.plan.actions == ONE_RUNS_AGAIN != first.plan.actions
    # What the engine does is what the plan of the step says: nothing leaves by the second, nothing runs again by the first or
    # where it is measured, when what does not fit leaves.
    moved = [bool(bytes_) for bytes_ in found.moved[1:]]
    assert moved[:4] + moved[5:] == [planned is first for planned in expected if planned is not None]
    assert [bool(again) for again in found.runs_again[1:]] == [planned is second for planned in expected]
    (line,) = lines
    assert line.startswith("a step takes 1000.0 ms at ")
    assert f" by the plan of the first step, and {1e3 * second_s:.1f} ms at " in line
    assert line.endswith(f" by the one of step 6, measured when all was warm: the {stays} stays")


def test_what_the_first_plan_runs_again_runs_once_in_the_step_that_is_measured(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), first=ONE_RUNS_AGAIN, second=ONE_LEAVES)
    found, _ = host.run(steps=7)
    assert found.runs_again == [0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("first_s", "slowdown"), [(1000.0, MOST_SLOWDOWN), (1e-9, 0.0)], ids=["late", "in time"])
def test_the_second_plan_is_for_a_host_as_late_as_the_steps_of_the_first_were(monkeypatch, caplog, first_s, slowdown):
    host = OwnHost(monkeypatch, caplog, (first_s, 0.5), second=ONE_LEAVES)
    host.run(steps=7)
    (_, least), (_, fitted) = host.asked
    assert fitted == max(least, slowdown)


@pytest.mark.parametrize(("more_bytes", "free_bytes"), [(5000, 5010), (-5000, 0)], ids=["too much", "too little"])
def test_what_the_first_plan_took_more_than_the_second_measurement_says_is_left_free(
    monkeypatch, caplog, more_bytes, free_bytes
):
    # What the first measurement says of a step is wrong by so many bytes; the second says the same but for them.
    make = functools.cache(measured_plans.MeasuredStep._make_models)
    measured = []

    def make_models(one, microbatches):
        measured.append(one)
        models = make(measured[0], microbatches)
        wrong_bytes = more_bytes if one is measured[0] else 0
        return tuple(dataclasses.replace(model, static_bytes=model.static_bytes + wrong_bytes) for model in models)

    monkeypatch.setattr(measured_plans.MeasuredStep, "_make_models", make_models)
    host = OwnHost(monkeypatch, caplog, (1e-9, 0.5), second=ONE_LEAVES)
    found, _ = host.run(beyond=(10, 0), steps=9, changes={8: {"global_batch_size": 8}})
    # Its steps took 10 bytes more than the first measurement says. A plan for more microbatches is of the second, too.
    assert [asked_bytes for asked_bytes, _ in host.asked] == [0, free_bytes, free_bytes]
    assert found.planned[6].free_bytes == free_bytes


def test_a_second_plan_that_takes_more_than_the_budget_is_left_at_once(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, lines = host.run(beyond=(0, 10**9), steps=9)
    assert found.planned[6].plan.actions == ONE_LEAVES
    assert found.planned[7] is found.planned[8] is found.planned[1]
    assert len(lines) == 1
    assert lines[0].startswith("a step by the plan of step 6 took")


def test_where_the_first_plan_is_above_the_budget_one_that_fits_stays_though_it_is_slower(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 1.5), second=ONE_LEAVES)
    # Three plans of the first step take more than the budget, and the last one stayed.
    found, lines = host.run(beyond=(20_000, 30_000, 40_000, -(10**9)), steps=14, part=0.8)
    assert found.planned[13].plan.actions == ONE_LEAVES
    assert lines[-1].endswith("the second stays")


def test_where_the_second_plan_does_the_same_the_first_stays(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5))
    found, lines = host.run(steps=9)
    assert len(host.asked) == 2
    assert found.planned == [None, *[found.planned[1]] * 4, None, *[found.planned[1]] * 3]
    assert lines == ["the plan of step 6 does the same: the first stays"]


def test_where_no_second_plan_is_found_the_first_stays_and_the_log_says_why(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ValueError("bounds cross"))
    # More microbatches are planned for by the first step, as the plan that stayed was.
    found, (line,) = host.run(steps=9, changes={8: {"global_batch_size": 8}})
    assert found.planned[6] is found.planned[7] is found.planned[1]
    assert all(found.moved[step] for step in (6, 7))
    why = (
        "step 6 was measured with all warm, and no plan came of it. the first process could not plan: ValueError: bounds cross"
    )
    assert line == f"the plan of the first step stays: {why}"
    assert found.planned[8].measured_step == 1


def test_where_one_process_has_no_second_measurement_the_first_plan_stays(monkeypatch, caplog):
    def gather(own):
        is_second = isinstance(own, measured_plans.ProcessMeasurement) and host.steps > 1
        return [own, "StateError: no step was recorded"] if is_second else [own]

    monkeypatch.setattr(auto, "gather", gather)
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, (line,) = host.run(steps=8)
    assert found.planned[6] is found.planned[7] is found.planned[1]
    assert line.endswith("no plan came of it. another process could not measure: StateError: no step was recorded")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IntegrationError("a layer is gone"), "a layer is gone"),
        (ValueError("a fault"), "this process could not measure: ValueError: a fault"),
    ],
)
def test_where_this_process_has_no_second_measurement_all_are_told(monkeypatch, caplog, error, reason):
    take = auto.AutoOffload.take_profile
    gathered = []

    def take_first(measurement):
        if host.steps > 1:
            raise error
        return take(measurement)

    monkeypatch.setattr(auto.AutoOffload, "take_profile", take_first)
    monkeypatch.setattr(auto, "gather", lambda own: gathered.append(own) or [own])
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, (line,) = host.run(steps=8)
    assert found.planned[6] is found.planned[7] is found.planned[1]
    assert f"{type(error).__name__}: {error}" in gathered
    assert line.endswith(f"no plan came of it. {reason}")
    assert [step for step, _ in host.measured] == [0, 5]  # what has no profile is dropped


def test_smaller_steps_are_not_timed_and_larger_ones_begin_anew(monkeypatch, caplog):
    changes = {4: {"global_batch_size": 2}, 5: {"global_batch_size": 4}, 10: {"global_batch_size": 8}}
    host = OwnHost(monkeypatch, caplog, (1000.0, 500.0), second=ONE_LEAVES)  # longer than a busy machine takes
    found, lines = host.run(steps=12, changes=changes)
    # One step more by the first plan; and in the middle of the trial a plan for more microbatches.
    assert found.planned[5] is found.planned[1]
    assert found.planned[6] is None
    assert found.planned[7].plan.actions == ONE_LEAVES
    assert found.planned[10].call.microbatches == 4
    # For no late host, and of what was measured last.
    assert len(host.asked) == 3
    assert host.asked[2][1] == host.asked[0][1] < host.asked[1][1]
    assert found.planned[10].measured_step == 7
    assert lines == []


def test_a_smaller_step_is_not_measured_again_but_the_next_that_is_none(monkeypatch, caplog):
    changes = {5: {"global_batch_size": 2}, 7: {"global_batch_size": 4}}
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, _ = host.run(steps=9, changes=changes)
    assert [step for step, _ in host.measured] == [0, 7]
    assert found.planned[5] is found.planned[6] is found.planned[1]
    assert found.planned[8].plan.actions == ONE_LEAVES


@pytest.mark.parametrize("change", [{"global_batch_size": 8}, {"seq_length": 48}], ids=["more", "larger"])
def test_a_step_beyond_the_plan_behind_the_second_measurement_ends_the_trial(monkeypatch, caplog, change):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    monkeypatch.setitem(globals(), "MIXED", f"{MIXED} --max-position-embeddings 64")
    found, lines = host.run(steps=8, changes={6: change}, part=0.9)
    beyond = [record.message for record in caplog.records if "is beyond the plan for 2 microbatches" in record.message]
    assert len(beyond) == 1
    assert lines == []
    if "seq_length" in change:
        assert [step for step, _ in host.measured] == [0, 5, 6]
        assert found.planned[6] is None
    else:
        assert [step for step, _ in host.measured] == [0, 5]
        assert (found.planned[6].measured_step, found.planned[6].call.microbatches) == (1, 4)


def test_a_second_measurement_that_does_not_end_leaves_the_first_plan(monkeypatch, caplog):
    finish = profiling.StepMeasurement.finish_step
    monkeypatch.setattr(
        profiling.StepMeasurement, "finish_step", lambda measurement: None if host.steps == 5 else finish(measurement)
    )
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, (line,) = host.run(steps=8)
    assert found.planned[6] is found.planned[7] is found.planned[1]
    assert "no plan came of it. no step was recorded. Call `request`" in line


def test_a_step_that_raised_is_not_timed(monkeypatch, caplog):
    finish = auto.AutoOffload.finish_step
    # What a schedule that raises leaves: the step began and did not end.
    monkeypatch.setattr(auto.AutoOffload, "finish_step", lambda measurement: None if host.steps == 3 else finish(measurement))
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    host.run(steps=9)
    assert [step for step, _ in host.measured] == [0, 6]  # one later than else


def test_an_evaluation_behind_the_second_measurement_is_no_part_of_a_step(monkeypatch, caplog):
    taken = []
    plan = measured_plans.MeasuredStep.plan
    monkeypatch.setattr(
        measured_plans.MeasuredStep,
        "plan",
        lambda measured, *args, **options: taken.append(measured.processes[0].rank) or plan(measured, *args, **options),
    )
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    take = profiling.StepMeasurement.take_profile

    def take_late(measurement):
        profile = take(measurement)
        return dataclasses.replace(profile, step_end_s=100.0) if host.steps > 1 else profile

    monkeypatch.setattr(profiling.StepMeasurement, "take_profile", take_late)
    host.run(steps=7)
    assert [rank.step_end_s for rank in taken] == [taken[0].step_end_s] * 2
    assert taken[0].step_end_s < 100.0


def test_evaluations_in_between_change_nothing(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    run_step = Trainer.run_step

    def run_and_evaluate(trainer, *args, **options):
        result = run_step(trainer, *args, **options)
        trainer.evaluate()
        return result

    monkeypatch.setattr(Trainer, "run_step", run_and_evaluate)
    found, (line,) = host.run()
    assert [step for step, _ in host.measured] == [0, 5]
    assert found.planned[12].plan.actions == ONE_LEAVES
    assert line.endswith("the second stays")


def test_the_slowest_process_says_what_a_step_took(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    others = iter([0.9, 2.0])  # of another process, whose steps take longer by the second plan
    monkeypatch.setattr(auto, "gather", lambda own: [own, next(others)] if isinstance(own, float) else [own])
    found, lines = host.run()
    assert found.planned[12] is found.planned[1]
    assert "1000.0 ms" in lines[0]
    assert "2000.0 ms" in lines[0]


def test_where_nothing_leaves_another_step_is_measured_too_and_the_host_is_in_time(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    found, _ = host.run(steps=8, part=4)
    assert [bool(moved) for moved in found.moved] == [False] * 6 + [True] * 2
    assert len(host.asked) == 2
    assert host.asked[0] == host.asked[1]
    assert host.measured == [(0, None), (5, {(0, 0), (0, 1)})]  # all of it fits, as the plan says


def test_on_a_device_that_is_its_host_nothing_is_measured_again(monkeypatch, caplog):
    found, _, _ = run_counted(monkeypatch, caplog, [0], steps=8)
    assert all(planned is found.planned[1] for planned in found.planned[1:])


def find_peak(measured, staying):
    """Return what a step takes in which all other layers leave."""
    (model,) = measured._make_models(2)
    plan = MegatronFlags(offload_modules=default_tags().names).make_plan([model])
    actions = {site: action for site, action in plan.actions.items() if (site.chunk, site.layer) not in staying}
    return simulate([dataclasses.replace(model, turn=Turn.CALL_BACK)], OffloadPlan(actions=actions)).peak_bytes


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("free_bytes", [0, 1000])
def test_as_many_layers_stay_in_the_second_measurement_as_fit(monkeypatch, caplog, count, free_bytes):
    found = []
    find_staying = measured_plans.MeasuredStep.find_staying

    def find(measured, call, **options):
        peak_bytes = find_peak(measured, [(0, number) for number in range(count)])
        budget_bytes = count_budget_bytes(peak_bytes, free_bytes=free_bytes)
        for missing_bytes in (0, 1):
            try:
                found.append(find_staying(measured, call, budget_bytes=budget_bytes - missing_bytes, free_bytes=free_bytes))
            except PlanError as error:
                found.append(str(error))
        return find_staying(measured, call, **options)

    monkeypatch.setattr(measured_plans.MeasuredStep, "find_staying", find)
    OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES).run(steps=6)
    fits, lacks_one = found
    assert fits == {(0, number) for number in range(count)}
    if count:
        assert lacks_one == {(0, number) for number in range(count - 1)}
    else:
        assert lacks_one.startswith("Though all leaves that may, a step in which nothing runs again lacks 1 B of")


def test_one_layer_of_each_kind_stays_before_others_do():
    dense, experts = (make_toy_layer(kind=kind) for kind in ("dense", "experts"))
    model = make_toy_rank(layers=[[dense, dense], [dense, experts, experts]])
    numbers = [number for _, number in measured_plans._order_layers(model)]
    assert numbers[:2] == [0, 3]
    assert sorted(numbers) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("staying", "allocated_part", "moves"), [(2, 0.5, False), (1, 0.5, True), (2, 1.0, True)])
def test_other_layers_leave_in_the_second_measurement_and_where_the_budget_is_full_all_do(
    monkeypatch, caplog, staying, allocated_part, moves
):
    layers = frozenset((0, number) for number in range(staying))
    monkeypatch.setattr(measured_plans.MeasuredStep, "find_staying", lambda *args, **options: layers)
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_RUNS_AGAIN)
    found, _ = host.run(steps=7, allocated_part=allocated_part)
    assert found.planned[5] is None
    assert (found.moved[5] > 0) == moves


def test_a_step_is_not_measured_again_where_that_would_be_above_the_budget(monkeypatch, caplog):
    host = OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_LEAVES)
    find_staying = measured_plans.MeasuredStep.find_staying

    def find(measured, call, *, budget_bytes, free_bytes):
        """Find it with half of the budget."""
        return find_staying(measured, call, budget_bytes=budget_bytes // 2, free_bytes=free_bytes)

    monkeypatch.setattr(measured_plans.MeasuredStep, "find_staying", find)
    found, (line,) = host.run(steps=8)
    assert all(planned is found.planned[1] for planned in found.planned[1:])
    assert line.startswith(
        "the plan of the first step stays: no step is measured with all warm. the first process: PlanError: "
    )


def test_what_a_step_took_is_not_compared_with_the_plan_behind_it(monkeypatch, caplog):
    # The third step has more microbatches, of fewer tokens: none that either plan is checked by.
    changes = {2: {"global_batch_size": 8, "seq_length": 16}, 3: {"global_batch_size": 8, "seq_length": 16}}
    found, _, lines = run_counted(monkeypatch, caplog, [30_000, 0], steps=4, changes=changes)
    assert found.planned[2] is found.planned[3] is not found.planned[1]
    assert lines == []


def test_times_are_of_whole_steps_behind_the_first():
    times = StepTimes(10.0)
    ends = [(19.0, True), (20.0, True), (21.0, False), (24.0, True), (26.0, True)]
    seen = []
    for end_s, is_full in ends:
        times.note_end(end_s, is_full=is_full)
        seen.append(times.median_s)
    # The first took 9 and the third was smaller; 1, 3 and 2 count.
    assert seen == [None, None, None, None, 2.0]


@pytest.mark.parametrize("staying", [{(0, 1)}, set()])
def test_a_layer_that_left_takes_the_times_of_one_of_its_kind_that_stayed(staying):
    with make_trainer(f"{MOE} --num-layers 3", make_auto(GIB)) as trainer:
        measurement = trainer.integration.measurement
        trainer.run_step()
        measurement._measure(frozenset(staying))
        trainer.run_step()
        (chunk,) = measurement.take_profile().chunks
    times = [[(one.forward_s, one.backward_s) for one in layer.model.segments] for layer in chunk.layers]
    # Two that are measured never take the same to the last digit.
    assert [own == times[1] for own in times] == [bool(staying), True, bool(staying)]
    assert len({tuple(own) for own in times}) == (1 if staying else 3)


def test_waits_for_copies_are_in_no_time_of_a_layer_that_left_while_it_was_measured(monkeypatch):
    now_s = [0.0]
    copy_bytes = CpuDevice.copy_bytes

    def copy_slowly(device, **options):
        """Only copies take time."""
        now_s[0] += 1.0
        copy_bytes(device, **options)

    monkeypatch.setattr(CpuDevice, "record_event", lambda device, stream, *, is_timed=False: now_s[0])
    monkeypatch.setattr(CpuDevice, "copy_bytes", copy_slowly)
    with make_trainer(f"{MOE} --num-layers 3", make_auto(GIB)) as trainer:
        measurement = trainer.integration.measurement
        measurement._measure(frozenset())
        trainer.run_step()
        copied_s = now_s[0]
        (chunk,) = measurement.take_profile().chunks
    assert copied_s > 3 * len(chunk.layers)
    segments = [*chunk.first, *chunk.last, *(one for layer in chunk.layers for one in layer.model.segments)]
    assert {(one.forward_s, one.backward_s) for one in segments} == {(0.0, 0.0)}


def with_extra_bytes(layer, *extra_bytes):
    """Return a toy layer whose stretches have so many bytes for a moment, backward and ten times that forward."""
    segments = zip(layer.segments, extra_bytes, strict=True)
    return dataclasses.replace(
        layer,
        segments=tuple(
            dataclasses.replace(segment, forward_extra_bytes=10 * size, backward_extra_bytes=size) for segment, size in segments
        ),
    )


def list_extra_bytes(layer):
    return [(one.forward_extra_bytes, one.backward_extra_bytes) for one in layer.model.segments]


def test_a_layer_that_left_takes_the_most_bytes_that_others_of_its_kind_have_for_a_moment():
    extra_bytes = [(1, 0, 3, 0), (0, 0, 0, 0), (0, 2, 2, 0)]
    layers = [
        NumberedLayer(number=number, model=with_extra_bytes(make_toy_layer(), *sizes))
        for number, sizes in enumerate(extra_bytes)
    ]
    other = NumberedLayer(number=3, model=with_extra_bytes(make_toy_layer(sizes=(1, 80, 6, 4, 2)), 9, 9, 9, 9))
    for left in ({1}, {0, 1, 2}):
        borrowed = measured_layers._borrow(layers[1], [*layers, other], left)
        assert list_extra_bytes(borrowed) == [(10, 1), (20, 2), (30, 3), (0, 0)]


def make_measured(*layers, number):
    """Return a step of one process in which these were measured."""
    chunk = ChunkModel(layers=tuple(NumberedLayer(number=index, model=layer) for index, layer in enumerate(layers)))
    rank = RankProfile(rank=0, pipeline=Pipeline(stages=1, microbatches=2), chunks=(chunk,), static_bytes=0, step_s=1.0)
    copies = (CopyRate(size_bytes=1, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, duplex_bytes_per_s=1e9),)
    link = LinkProfile(copies=copies, compute_slowdown=0.0)
    process = measured_plans.ProcessMeasurement(rank=rank, link=link, host_budget_bytes=0)
    call = ScheduleCall(microbatches=2, tokens=1)
    return measured_plans.MeasuredStep(
        processes=(process,), call=call, number=number, device_type="cpu", policy=TransferPolicy()
    )


def test_what_a_layer_has_for_a_moment_is_known_from_either_measured_step():
    older = make_measured(with_extra_bytes(make_toy_layer(), 1, 2, 0, 0), make_toy_layer(), number=1)
    newer = make_measured(
        with_extra_bytes(make_toy_layer(), 0, 0, 3, 0), with_extra_bytes(make_toy_layer(), 0, 4, 0, 0), number=6
    )
    joined = newer.join_extra_bytes(older)
    first, second = joined.processes[0].rank.layers
    assert list_extra_bytes(first) == [(10, 1), (20, 2), (30, 3), (0, 0)]
    assert list_extra_bytes(second) == [(0, 0), (40, 4), (0, 0), (0, 0)]
    assert joined.number == 6


def test_a_second_plan_knows_what_was_measured_for_the_first(monkeypatch, caplog):
    joined = []
    join = measured_plans.MeasuredStep.join_extra_bytes

    def note(measured, former):
        joined.append((measured.number, former.number))
        return join(measured, former)

    monkeypatch.setattr(measured_plans.MeasuredStep, "join_extra_bytes", note)
    OwnHost(monkeypatch, caplog, (1.0, 0.5), second=ONE_RUNS_AGAIN).run(steps=8)
    assert joined == [(6, 1)]
