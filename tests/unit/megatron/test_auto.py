"""Tests `--offload-modules auto`: the first step measures, later steps meet the budget, and results are bitwise identical."""

import dataclasses
import logging
import re

import pytest
from support.trainings import HIDDEN_BYTES, MIXED, make_trainer, train

from fgoffload import Action, IntegrationError, OffloadConfig, OffloadError, OffloadPlan, PlanError, Site
from fgoffload.engine import ActivationLedger
from fgoffload.integrations.megatron.auto import auto_offload as auto
from fgoffload.integrations.megatron.auto import measured_plans
from fgoffload.integrations.megatron.profile import step_measurement as profiling
from fgoffload.integrations.megatron.profile.device_memory import MemoryReading
from fgoffload.planner import host_overhead
from fgoffload.planner.solving import solver
from fgoffload.tags import default_tags
from fgoffload.units import format_bytes

pytestmark = pytest.mark.usefixtures("parallel")

NORMED = MIXED.replace("--normalization RMSNorm", "")
ONE_DENSE_LAYER = "--num-layers 1 --moe-layer-freq [0]"
AUTO_LOGGER = "fgoffload.integrations.megatron.auto.auto_offload"


def make_auto(budget_bytes, **options):
    options.setdefault("min_offloaded_tensor_size", 16)
    options.setdefault("offload_window_bytes", 16 * 1024)
    options.setdefault("offload_prefetch_bytes", 16 * 1024)
    return OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=budget_bytes, **options)


@dataclasses.dataclass
class Steps:
    """The results of some steps, one entry a step."""

    results: list = dataclasses.field(default_factory=list)
    offloaded_bytes: list = dataclasses.field(default_factory=list)
    peak_bytes: list = dataclasses.field(default_factory=list)
    """Peak bytes of activations."""
    planned: list = dataclasses.field(default_factory=list)
    """The plan in use after the step."""


def run(flags, config, *, steps=3, changes=None, on_trainer=lambda trainer: None):
    """Train, with the arguments of some steps replaced by `changes`."""
    found = Steps()
    with make_trainer(flags, config) as trainer:
        on_trainer(trainer)
        for step in range(steps):
            trainer.arguments = dataclasses.replace(trainer.arguments, **(changes or {}).get(step, {}))
            ledger = ActivationLedger(parameters=trainer.parameters())
            with trainer.observe(ledger):
                result = trainer.run_step()
            found.results.append((result.losses, result.gradient_digests))
            found.peak_bytes.append(ledger.peak_bytes)
            if config is not None:
                found.offloaded_bytes.append(trainer.integration.last_step.d2h_bytes)
                found.planned.append(trainer.integration.measurement.planned)
    return found


def count_static(flags):
    """Return the bytes of parameters and gradients, in fp32."""
    with make_trainer(flags, None) as trainer:
        return sum(parameter.numel() * 2 * 4 for parameter in trainer.parameters())


@pytest.fixture(scope="module")
def baseline(parallel):
    return run(MIXED, None, steps=12)


@pytest.fixture(scope="module")
def static_bytes(parallel):
    return count_static(MIXED)


def test_auto_is_bitwise_identical_and_meets_the_budget_after_the_first_step(baseline, static_bytes):
    budget_bytes = static_bytes + int(0.5 * baseline.peak_bytes[1])
    found = run(MIXED, make_auto(budget_bytes))
    assert found.results == baseline.results[:3]
    # The first step would exceed the budget, so it offloads while it is measured.
    assert found.offloaded_bytes[0] > 0
    assert found.peak_bytes[0] < baseline.peak_bytes[0]
    for step in (1, 2):
        assert found.offloaded_bytes[step] > 0
        predicted_bytes = found.planned[step].peak_bytes - static_bytes
        # Tensors saved by the loss function are not counted: up to 0.5% of this tiny model.
        assert static_bytes + found.peak_bytes[step] <= 1.005 * budget_bytes
        # CPU copies are immediate. Simulated copies take time, while both source and destination are allocated.
        assert 0.6 * predicted_bytes <= found.peak_bytes[step] <= 1.03 * predicted_bytes


def test_an_ample_budget_offloads_nothing_and_the_peak_matches_the_prediction(baseline, static_bytes):
    found = run(MIXED, make_auto(static_bytes + 2 * baseline.peak_bytes[1]))
    assert found.results == baseline.results[:3]
    assert found.offloaded_bytes == [0, 0, 0]
    assert found.planned[1].plan == OffloadPlan(actions={})
    # The few bytes per token that autograd saves in the loss function are not counted.
    assert found.peak_bytes[1] == pytest.approx(found.planned[1].peak_bytes - static_bytes, rel=0.03)


def choose(monkeypatch, make_actions):
    """Make the solver choose the actions that `make_actions` returns for each layer, by tag or unit."""
    real = solver.solve
    chosen = {}

    def solve(ranks, *, budget_bytes, **options):
        solution = real(ranks, budget_bytes=2**50)
        for rank in ranks:
            for number, chunk in enumerate(rank.chunks):
                for layer in chunk.layers:
                    assert layer.model.offloadable_tags <= {*default_tags().names}  # only known tags
                    for name, action in make_actions(layer.model).items():
                        chosen[Site(chunk=number, layer=layer.number, tag=name)] = action
        return dataclasses.replace(solution, plan=OffloadPlan(actions=chosen))

    monkeypatch.setattr(solver, "solve", solve)
    return chosen


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        # Norms of plain ops, where Megatron's own recompute changes the order of sums.
        (MIXED, ("attn_norm", "mlp_norm", "core_attn", "mlp", "shared_expert")),
        (NORMED, ("attn_norm", "mlp_norm", "core_attn", "mlp", "moe")),
        (MIXED, ("layer",)),
        (NORMED, ("qkv_linear", "mlp_fc1", "attn_norm", "mlp_norm")),
    ],
)
def test_every_profiled_unit_recomputes_bitwise_identically(flags, units, monkeypatch):
    chosen = choose(monkeypatch, lambda layer: {unit.name: Action.RECOMPUTE for unit in layer.units if unit.name in units})
    found = run(flags, make_auto(2**40))
    assert found.results == train(flags, steps=3)[0]
    assert {site.tag for site in chosen} == set(units)
    assert found.peak_bytes[2] < found.peak_bytes[0]


def test_a_recomputed_layer_offloads_its_input(monkeypatch):
    choose(monkeypatch, lambda layer: {"layer": Action.RECOMPUTE, "layer_input": Action.OFFLOAD})
    flags = NORMED.replace("--position-embedding-type rope", "")
    found = run(flags, make_auto(2**40, min_offloaded_tensor_size=2048))
    assert found.results == train(flags, steps=3)[0]
    assert found.offloaded_bytes == [0, *[2 * 2 * HIDDEN_BYTES] * 2]  # layers and microbatches


def test_larger_steps_are_replanned_before_they_run(caplog):
    """More microbatches reuse the first measurement; longer sequences are measured again."""
    caplog.set_level(logging.INFO, logger=AUTO_LOGGER)
    flags = f"{MIXED} --max-position-embeddings 64"
    changes = {2: {"global_batch_size": 8}, 3: {"global_batch_size": 4, "seq_length": 64}}
    expected = run(flags, None, steps=6, changes=changes)
    budget_bytes = count_static(flags) + int(0.7 * expected.peak_bytes[4])
    found = run(flags, make_auto(budget_bytes), steps=6, changes=changes)
    assert found.results == expected.results
    calls = [planned and (planned.call.microbatches, planned.call.tokens) for planned in found.planned]
    assert calls[:5] == [None, (2, 64), (4, 64), None, (2, 128)]
    assert sum("exceeds the plan for" in record.message for record in caplog.records) == 2
    assert count_static(flags) + max(found.peak_bytes[4:]) <= budget_bytes


@pytest.mark.parametrize(
    ("flags", "budget", "error", "message"),
    [
        ("", lambda static: static // 2, PlanError, "--offload-memory-budget .* not above the static memory.*Use a budget of"),
        (ONE_DENSE_LAYER, lambda static: static + 50_000, PlanError, r" by [\d.]+ KiB at .* Use a budget of [\d.]+KiB"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            lambda static: 2**40,
            IntegrationError,
            "--offload-modules auto chooses recompute layer by layer",
        ),
    ],
    ids=["below static", "too small", "recompute flags"],
)
def test_auto_rejects_unsupported_settings(flags, budget, error, message):
    flags = f"{MIXED} {flags}"
    with pytest.raises(error, match=message):
        run(flags, make_auto(budget(count_static(flags))), steps=2)


class CountedMemory:
    """Fakes allocator readings: each step uses more bytes than predicted."""

    def __init__(self, static_bytes, excess_bytes):
        self.static_bytes = static_bytes
        self.trainer = None
        self.excess_bytes = excess_bytes
        """Bytes above the prediction, by plan. The last entry applies to all later plans."""
        self.plans = []

    def count_allocated(self):
        return self.static_bytes

    def read(self):
        return MemoryReading(allocated_bytes=self.static_bytes, peak_bytes=self.static_bytes)

    def take_peak(self):
        return self.static_bytes

    def count_peak(self):
        planned = self.trainer.integration.measurement.planned
        if planned not in self.plans:
            self.plans.append(planned)
        return planned.peak_bytes + self.excess_bytes[min(self.plans.index(planned), len(self.excess_bytes) - 1)]


@pytest.fixture
def run_counted(monkeypatch, caplog, baseline, static_bytes):
    """Return a function that trains with steps that use more bytes than predicted."""

    def run_steps(excess_bytes, *, part=0.7, steps=6, on_trainer=lambda trainer: None):
        """Return the steps, the budget and the log lines about the budget."""
        caplog.set_level(logging.INFO, logger=AUTO_LOGGER)
        memory = CountedMemory(static_bytes, excess_bytes)
        monkeypatch.setattr(profiling, "find_device_memory", lambda device_type: memory)
        budget_bytes = static_bytes + int(part * max(baseline.peak_bytes))

        def set_trainer(trainer):
            memory.trainer = trainer
            on_trainer(trainer)

        found = run(MIXED, make_auto(budget_bytes), steps=steps, on_trainer=set_trainer)
        assert found.results == baseline.results[:steps]
        lines = [(record.levelname, record.message) for record in caplog.records if "above the budget" in record.message]
        return found, budget_bytes, lines

    return run_steps


def test_a_step_above_the_budget_triggers_a_new_plan(run_counted):
    found, budget_bytes, lines = run_counted([100_000, 200_000], steps=5)
    assert found.planned[1].peak_bytes + 100_000 > budget_bytes
    assert found.planned[2].peak_bytes <= budget_bytes - 100_000
    assert found.planned[3].peak_bytes <= budget_bytes - 200_000
    assert found.planned[3] is found.planned[4]
    assert [level for level, _ in lines] == ["INFO", "INFO"]
    above_bytes = found.planned[1].peak_bytes + 100_000 - budget_bytes
    assert f"{format_bytes(above_bytes)} above the budget" in lines[0][1]


def test_the_third_plan_is_kept_with_a_warning(run_counted):
    found, _, lines = run_counted([200_000, 280_000, 360_000, 440_000], part=0.8)
    assert found.planned[3] is found.planned[5]
    assert [level for level, _ in lines] == ["INFO", "INFO", "WARNING"]
    assert "after 3 plans: keeping the last one. Lower the budget by that much." in lines[2][1]


def test_all_processes_replan_if_one_exceeds_the_budget(run_counted, monkeypatch):
    gathered = []

    def gather(own):
        gathered.append(own)
        is_peak = isinstance(own, tuple)
        other = (own[0], own[1] + 200_000) if is_peak and len(gathered) == 2 else own
        return [own, other]

    monkeypatch.setattr(auto, "gather", gather)
    found, budget_bytes, lines = run_counted([0], steps=4)
    assert found.planned[2].peak_bytes <= budget_bytes - 200_000 < found.planned[1].peak_bytes
    assert len(lines) == 1


def test_a_planner_error_is_raised_on_all_processes(monkeypatch):
    def solve(models, **options):
        raise ValueError("bounds cross")

    monkeypatch.setattr(solver, "solve", solve)
    with pytest.raises(OffloadError, match="the first process: ValueError: bounds cross"):
        run(MIXED, make_auto(2**40), steps=2)


OFFLOAD_ONE = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}


@pytest.fixture
def run_as_on_gpu(monkeypatch, run_counted, caplog):
    """Return a function that trains as on a GPU, where auto also tries a second plan."""

    def run_steps(*, second_s=0.5, second=OFFLOAD_ONE, excess_bytes=(0,), steps):
        """Train with steps of 1 s under the first plan and of `second_s` under the second plan, `second`."""
        measurements, now_s, real = [], [0.0], solver.solve_leaving_free

        def read_clock():
            planned = measurements[0].planned
            if planned is not None:
                now_s[0] += second_s if planned.measured_step > 1 else 1.0
            return now_s[0]

        def solve(ranks, **options):
            if measurements[0]._first_tried is None:
                return real(ranks, **options)
            if isinstance(second, Exception):
                raise second
            solution = real(ranks, **options)
            return dataclasses.replace(solution, plan=dataclasses.replace(solution.plan, actions=second))

        def register(trainer):
            measurements.append(trainer.integration.measurement)
            monkeypatch.setattr(measurements[0], "_is_on_gpu", True)

        monkeypatch.setattr(auto, "perf_counter", read_clock)
        monkeypatch.setattr(measured_plans, "solve_leaving_free", solve)
        # In so small a model, copies are much shorter than compute on a CPU.
        monkeypatch.setattr(host_overhead, "LEAST_EFFECT", 1e-9)
        found, _, _ = run_counted(list(excess_bytes), steps=steps, on_trainer=register)
        return found, [record.message for record in caplog.records if "keeping" in record.message]

    return run_steps


@pytest.mark.parametrize(("second_s", "kept"), [(0.5, "second"), (1.0, "first")])
def test_the_faster_of_two_plans_is_kept(run_as_on_gpu, second_s, kept):
    found, (line,) = run_as_on_gpu(second_s=second_s, steps=12)
    # A measurement, then one untimed and three timed steps with a plan; the same with a second plan; then the faster one.
    first, second = found.planned[1], found.planned[6]
    expected = [first] * 4 + [None] + [second] * 4 + [second if kept == "second" else first] * 2
    assert found.planned[1:] == expected
    assert second.plan.actions == OFFLOAD_ONE != first.plan.actions
    assert line.startswith("a step takes 1000.0 ms at ")
    assert line.endswith(f"keeping the {kept} plan")


def test_remeasuring_keeps_the_larger_temporary_bytes(run_as_on_gpu, monkeypatch):
    profiles, real_solve = [], solver.solve

    def add_temporary_bytes(own, take=auto.AutoOffload._take_measurement):
        measured = take(own)
        extra_bytes = 0 if profiles else 1000  # as if the layers were offloaded in the second measured step
        profiles.append(measured)
        for chunk in measured.rank.chunks:
            for layer in chunk.layers:
                for segment in layer.model.segments:
                    object.__setattr__(segment, "backward_extra_bytes", extra_bytes)
        return measured

    def solve(ranks, **options):
        seen.append({one.backward_extra_bytes for layer in ranks[0].chunks[0].layers for one in layer.model.segments})
        return real_solve(ranks, **options)

    seen = []
    monkeypatch.setattr(auto.AutoOffload, "_take_measurement", add_temporary_bytes)
    monkeypatch.setattr(solver, "solve", solve)
    run_as_on_gpu(steps=12)
    assert (len(profiles), seen) == (2, [{1000}, {1000}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"excess_bytes": (0, 10**9)}, "a step under the plan from step 6 used"),
        (
            {"second": ValueError("bounds cross")},
            "keeping the plan from the first step: .*the first process: ValueError: bounds",
        ),
    ],
    ids=["above the budget", "no plan"],
)
def test_an_unusable_second_plan_is_discarded_for_the_first(run_as_on_gpu, options, message):
    found, lines = run_as_on_gpu(steps=9, **options)
    assert found.planned[7] is found.planned[8] is found.planned[1]
    assert len(lines) == 1
    assert re.match(message, lines[0])
