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

    bits: list = dataclasses.field(default_factory=list)
    moved: list = dataclasses.field(default_factory=list)
    peak_bytes: list = dataclasses.field(default_factory=list)
    """Activations at their peak."""
    planned: list = dataclasses.field(default_factory=list)
    """The plan in use after the step."""


def run(flags, config, *, steps=3, changes=None, on_trainer=lambda trainer: None):
    """Train, each step with the arguments that `changes` has for it."""
    found = Steps()
    with make_trainer(flags, config) as trainer:
        on_trainer(trainer)
        for step in range(steps):
            trainer.arguments = dataclasses.replace(trainer.arguments, **(changes or {}).get(step, {}))
            ledger = ActivationLedger(parameters=trainer.parameters())
            with trainer.observe(ledger):
                result = trainer.run_step()
            found.bits.append((result.losses, result.gradient_digests))
            found.peak_bytes.append(ledger.peak_bytes)
            if config is not None:
                found.moved.append(trainer.integration.last_step.d2h_bytes)
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


def test_every_step_has_the_same_bits_and_all_but_the_first_keep_to_the_budget(baseline, static_bytes):
    budget_bytes = static_bytes + int(0.5 * baseline.peak_bytes[1])
    found = run(MIXED, make_auto(budget_bytes))
    assert found.bits == baseline.bits[:3]
    # The first step would not fit: it offloads while it is measured.
    assert found.moved[0] > 0
    assert found.peak_bytes[0] < baseline.peak_bytes[0]
    for step in (1, 2):
        assert found.moved[step] > 0
        predicted_bytes = found.planned[step].peak_bytes - static_bytes
        # What the loss function saves is not seen: up to half a percent of this tiny model.
        assert static_bytes + found.peak_bytes[step] <= 1.005 * budget_bytes
        # The CPU's copies are done at once. The simulator's take time, in which both sides hold the bytes.
        assert 0.6 * predicted_bytes <= found.peak_bytes[step] <= 1.03 * predicted_bytes


def test_a_budget_for_everything_offloads_nothing_and_its_peak_is_predicted(baseline, static_bytes):
    found = run(MIXED, make_auto(static_bytes + 2 * baseline.peak_bytes[1]))
    assert found.bits == baseline.bits[:3]
    assert found.moved == [0, 0, 0]
    assert found.planned[1].plan == OffloadPlan(actions={})
    # The few bytes a token that autograd saves in the loss function, outside of the model, are not seen.
    assert found.peak_bytes[1] == pytest.approx(found.planned[1].peak_bytes - static_bytes, rel=0.03)


def choose(monkeypatch, make_actions):
    """Let the solver choose what `make_actions` returns for a layer: actions by tag or unit."""
    real = solver.solve
    chosen = {}

    def solve(ranks, *, budget_bytes, **options):
        solution = real(ranks, budget_bytes=2**50)
        for rank in ranks:
            for number, chunk in enumerate(rank.chunks):
                for layer in chunk.layers:
                    assert layer.model.offloadable_tags <= {*default_tags().names}  # no site offloads what others save
                    for name, action in make_actions(layer.model).items():
                        chosen[Site(chunk=number, layer=layer.number, tag=name)] = action
        return dataclasses.replace(solution, plan=OffloadPlan(actions=chosen))

    monkeypatch.setattr(solver, "solve", solve)
    return chosen


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        # Norms of plain ops: Megatron's own recompute of them changes the order of sums.
        (MIXED, ("attn_norm", "mlp_norm", "core_attn", "mlp", "shared_expert")),
        (NORMED, ("attn_norm", "mlp_norm", "core_attn", "mlp", "moe")),
        (MIXED, ("layer",)),
        (NORMED, ("qkv_linear", "mlp_fc1", "attn_norm", "mlp_norm")),
    ],
)
def test_every_unit_that_a_profile_offers_recomputes_with_the_same_bits(flags, units, monkeypatch):
    chosen = choose(monkeypatch, lambda layer: {unit.name: Action.RECOMPUTE for unit in layer.units if unit.name in units})
    found = run(flags, make_auto(2**40))
    assert found.bits == train(flags, steps=3)[0]
    assert {site.tag for site in chosen} == set(units)
    assert found.peak_bytes[2] < found.peak_bytes[0]


def test_a_recomputed_layer_offloads_its_input(monkeypatch):
    choose(monkeypatch, lambda layer: {"layer": Action.RECOMPUTE, "layer_input": Action.OFFLOAD})
    flags = NORMED.replace("--position-embedding-type rope", "")
    found = run(flags, make_auto(2**40, min_offloaded_tensor_size=2048))
    assert found.bits == train(flags, steps=3)[0]
    assert found.moved == [0, *[2 * 2 * HIDDEN_BYTES] * 2]  # layers and microbatches


def test_larger_steps_are_planned_before_they_run(caplog):
    """More microbatches are planned from the first measurement; longer sequences are measured again."""
    caplog.set_level(logging.INFO, logger=AUTO_LOGGER)
    flags = f"{MIXED} --max-position-embeddings 64"
    changes = {2: {"global_batch_size": 8}, 3: {"global_batch_size": 4, "seq_length": 64}}
    expected = run(flags, None, steps=6, changes=changes)
    budget_bytes = count_static(flags) + int(0.7 * expected.peak_bytes[4])
    found = run(flags, make_auto(budget_bytes), steps=6, changes=changes)
    assert found.bits == expected.bits
    calls = [planned and (planned.call.microbatches, planned.call.tokens) for planned in found.planned]
    assert calls[:5] == [None, (2, 64), (4, 64), None, (2, 128)]
    assert sum("exceeds the plan for" in record.message for record in caplog.records) == 2
    assert count_static(flags) + max(found.peak_bytes[4:]) <= budget_bytes


@pytest.mark.parametrize(
    ("flags", "budget", "error", "says"),
    [
        ("", lambda static: static // 2, PlanError, "--offload-memory-budget .* not above the static memory.*Use a budget of"),
        (ONE_DENSE_LAYER, lambda static: static + 50_000, PlanError, r"lacks [\d.]+ KiB at .* Use a budget of [\d.]+KiB"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            lambda static: 2**40,
            IntegrationError,
            "--offload-modules auto chooses recompute layer by layer",
        ),
    ],
    ids=["below static", "too small", "recompute flags"],
)
def test_settings_that_auto_does_not_support_are_refused(flags, budget, error, says):
    flags = f"{MIXED} {flags}"
    with pytest.raises(error, match=says):
        run(flags, make_auto(budget(count_static(flags))), steps=2)


class CountedMemory:
    """Replaces the allocator: a step takes its predicted bytes and some more."""

    def __init__(self, static_bytes, beyond):
        self.static_bytes = static_bytes
        self.trainer = None
        self.beyond = beyond
        """By plan: the bytes that its steps take beyond their prediction. The last entry holds for all later plans."""
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
        return planned.peak_bytes + self.beyond[min(self.plans.index(planned), len(self.beyond) - 1)]


@pytest.fixture
def run_counted(monkeypatch, caplog, baseline, static_bytes):
    """Returns a function that trains where steps take more bytes than predicted."""

    def run_it(beyond, *, part=0.7, steps=6, on_trainer=lambda trainer: None):
        """Return the steps, the budget and the log lines about the budget."""
        caplog.set_level(logging.INFO, logger=AUTO_LOGGER)
        memory = CountedMemory(static_bytes, beyond)
        monkeypatch.setattr(profiling, "find_device_memory", lambda device_type: memory)
        budget_bytes = static_bytes + int(part * max(baseline.peak_bytes))

        def note_trainer(trainer):
            memory.trainer = trainer
            on_trainer(trainer)

        found = run(MIXED, make_auto(budget_bytes), steps=steps, on_trainer=note_trainer)
        assert found.bits == baseline.bits[:steps]
        lines = [(record.levelname, record.message) for record in caplog.records if "above the budget" in record.message]
        return found, budget_bytes, lines

    return run_it


def test_a_step_above_the_budget_is_planned_again(run_counted):
    found, budget_bytes, lines = run_counted([60_000, 120_000], steps=5)
    assert found.planned[1].peak_bytes + 60_000 > budget_bytes
    assert found.planned[2].peak_bytes <= budget_bytes - 60_000
    assert found.planned[3].peak_bytes <= budget_bytes - 120_000
    assert found.planned[3] is found.planned[4]
    assert [level for level, _ in lines] == ["INFO", "INFO"]
    above_bytes = found.planned[1].peak_bytes + 60_000 - budget_bytes
    assert f"{format_bytes(above_bytes)} above the budget" in lines[0][1]


def test_after_three_plans_the_last_one_is_kept_with_a_warning(run_counted):
    found, _, lines = run_counted([60_000, 120_000, 180_000, 240_000], part=0.8)
    assert found.planned[3] is found.planned[5]
    assert [level for level, _ in lines] == ["INFO", "INFO", "WARNING"]
    assert "after 3 plans: keeping the last one. Lower the budget by that much." in lines[2][1]


def test_all_processes_plan_again_when_one_is_above_the_budget(run_counted, monkeypatch):
    gathered = []

    def gather(own):
        gathered.append(own)
        is_peak = isinstance(own, tuple)
        other = (own[0], own[1] + 60_000) if is_peak and len(gathered) == 2 else own
        return [own, other]

    monkeypatch.setattr(auto, "gather", gather)
    found, budget_bytes, lines = run_counted([0], steps=4)
    assert found.planned[2].peak_bytes <= budget_bytes - 60_000 < found.planned[1].peak_bytes
    assert len(lines) == 1


def test_an_error_of_the_planner_reaches_all_processes(monkeypatch):
    def solve(models, **options):
        raise ValueError("bounds cross")

    monkeypatch.setattr(solver, "solve", solve)
    with pytest.raises(OffloadError, match="the first process: ValueError: bounds cross"):
        run(MIXED, make_auto(2**40), steps=2)


ONE_LEAVES = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}


@pytest.fixture
def run_beside_host(monkeypatch, run_counted, caplog):
    """Returns a function that trains as on a GPU: the host is not the device, and a second plan is tried."""

    def run_it(*, second_s=0.5, second=ONE_LEAVES, beyond=(0,), steps):
        """Train: a step takes 1 s with the first plan and `second_s` with the second, which is `second`."""
        seen, now_s, real = [], [0.0], solver.solve_leaving_free

        def read_clock():
            planned = seen[0].planned
            if planned is not None:
                now_s[0] += second_s if planned.measured_step > 1 else 1.0
            return now_s[0]

        def solve(ranks, **options):
            if seen[0]._first_tried is None:
                return real(ranks, **options)
            if isinstance(second, Exception):
                raise second
            solution = real(ranks, **options)
            return dataclasses.replace(solution, plan=dataclasses.replace(solution.plan, actions=second))

        def see(trainer):
            seen.append(trainer.integration.measurement)
            monkeypatch.setattr(seen[0], "_is_on_gpu", True)

        monkeypatch.setattr(auto, "perf_counter", read_clock)
        monkeypatch.setattr(measured_plans, "solve_leaving_free", solve)
        # Copies of so small a model are short beside its compute on a CPU.
        monkeypatch.setattr(host_overhead, "LEAST_EFFECT", 1e-9)
        found, _, _ = run_counted(list(beyond), steps=steps, on_trainer=see)
        return found, [record.message for record in caplog.records if re.search("stays|keeping", record.message)]

    return run_it


@pytest.mark.parametrize(("second_s", "stays"), [(0.5, "second"), (1.0, "first")])
def test_the_faster_of_two_plans_is_kept(run_beside_host, second_s, stays):
    found, (line,) = run_beside_host(second_s=second_s, steps=12)
    # Measured; a first step and three timed ones by the plan; measured again; as many by another plan; then the better one.
    first, second = found.planned[1], found.planned[6]
    expected = [first] * 4 + [None] + [second] * 4 + [second if stays == "second" else first] * 2
    assert found.planned[1:] == expected
    assert second.plan.actions == ONE_LEAVES != first.plan.actions
    assert line.startswith("a step takes 1000.0 ms at ")
    assert line.endswith(f"keeping the {stays} plan")


def test_a_second_measurement_keeps_the_larger_temporary_bytes_of_the_first(run_beside_host, monkeypatch):
    profiles, real_solve = [], solver.solve

    def grow(own, take=auto.AutoOffload._take_measurement):
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
    monkeypatch.setattr(auto.AutoOffload, "_take_measurement", grow)
    monkeypatch.setattr(solver, "solve", solve)
    run_beside_host(steps=12)
    assert (len(profiles), seen) == (2, [{1000}, {1000}])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beyond": (0, 10**9)}, "a step under the plan from step 6 used"),
        (
            {"second": ValueError("bounds cross")},
            "keeping the plan from the first step: .*the first process: ValueError: bounds",
        ),
    ],
    ids=["above the budget", "no plan"],
)
def test_a_second_plan_that_cannot_be_used_leaves_the_first(run_beside_host, options, says):
    found, lines = run_beside_host(steps=9, **options)
    assert found.planned[7] is found.planned[8] is found.planned[1]
    assert len(lines) == 1
    assert re.match(says, lines[0])
