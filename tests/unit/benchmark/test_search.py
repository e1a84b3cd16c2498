"""The search for Megatron-Core's flags, on a stand-in whose times and bytes are made up: its engine needs a GPU."""

import dataclasses
import io
import json
import random
import sys

import pytest
from rich.console import Console

from fgoffload.benchmark import search_runs as search_runs_module
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.measurement import Measurement, Outcome, Summary
from fgoffload.benchmark.search import Measured, Sample, SearchSpace, search
from fgoffload.benchmark.search_report import (
    build_search_table,
    describe_search,
    format_search,
    list_candidates,
    to_fields,
)
from fgoffload.benchmark.search_runs import SearchRuns, make_space
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting

GIB = 2**30
MODULES = ("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")
RECOMPUTES = (("full",), ("layernorm",), ("moe_act",))
SPACE = SearchSpace(modules=MODULES, recomputes=RECOMPUTES, has_fraction=False)

FREED_GIB = {"qkv_linear": 1.0, "core_attn": 0.5, "attn_proj": 1.0, "expert_fc1": 1.5, "moe_act": 2.0}
ADDED = {"qkv_linear": 0.02, "core_attn": 0.01, "attn_proj": 0.01, "expert_fc1": 0.01, "moe_act": 0.12}
RERUNS = {"full": (6.0, 0.30), "layernorm": (0.5, 0.01), "moe_act": (1.0, 0.03)}


def take(setting):
    """Return what a setting takes on the stand-in: sums, and a fifth more time where more than two modules share the link."""
    crowd = 1.2 if len(setting.modules) > 2 else 1.0
    peak_gib = 20 - setting.fraction * sum(FREED_GIB[one] for one in setting.modules)
    ratio = 1 + setting.fraction * crowd * sum(ADDED[one] for one in setting.modules)
    for one in setting.recompute:
        peak_gib -= RERUNS[one][0]
        ratio += RERUNS[one][1]
    return Sample(ratio, round(peak_gib * GIB))


class Machine:
    """Measures on the stand-in, and notes what it was asked for, round by round."""

    def __init__(self, *, failing=()):
        self.rounds = []
        self._failing = {parse_setting(name) for name in failing}

    def measure(self, settings):
        self.rounds.append([setting.name for setting in settings])
        failures = {setting: "refused" for setting in settings if setting in self._failing}
        samples = {setting: take(setting) for setting in (NOTHING, *settings) if setting not in failures}
        return Measured(samples, failures)


def find(space, budgets_gib, *, limit=100, **options):
    machine = Machine(**options)
    budgets = [round(one * GIB) for one in budgets_gib]
    return search(space, budgets, nothing=NOTHING, limit=limit, measure=machine.measure), machine


def list_all(space):
    """Return every setting of the space that is no contradiction."""
    fractions = ("", "@0.25", "@0.5", "@0.75") if space.has_fraction else ("",)
    for bits in range(1, 2 ** len(space.modules)):
        modules = [one for place, one in enumerate(space.modules) if bits >> place & 1]
        if "attn_proj" in modules and "core_attn" not in modules:
            continue
        for recompute in ("", *("/" + "+".join(one) for one in space.recomputes if one != ("full",))):
            for fraction in fractions:
                yield parse_setting(f"megatron:{'+'.join(modules)}{fraction}{recompute}")
    yield from (parse_setting(f"recompute:{'+'.join(one)}") for one in space.recomputes)


def test_modules_come_with_what_they_need_and_recomputes_alone_come_first():
    _, machine = find(SPACE, [18])
    assert machine.rounds[0] == [
        *("megatron:qkv_linear", "megatron:core_attn", "megatron:core_attn+attn_proj"),
        *("megatron:expert_fc1", "megatron:moe_act"),
        *("recompute:full", "recompute:layernorm", "recompute:moe_act"),
    ]


@pytest.mark.parametrize("budget_gib", [19.5, 18.5, 17.5, 16.5, 15.5, 14.2])
@pytest.mark.parametrize("has_fraction", [False, True])
def test_it_finds_the_fastest_of_all_with_a_part_of_the_measurements(budget_gib, has_fraction):
    space = SearchSpace(modules=MODULES, recomputes=RECOMPUTES, has_fraction=has_fraction)
    result, _ = find(space, [budget_gib])
    samples = [take(one) for one in list_all(space)]
    assert result.possible == len(samples)
    best = min(one.ratio for one in samples if one.peak_bytes <= budget_gib * GIB)
    (fastest,) = result.list_fastest(round(budget_gib * GIB))
    assert result.samples[fastest].peak_bytes <= budget_gib * GIB
    assert result.samples[fastest].ratio == best
    assert result.tried < len(samples) / 3
    assert result.is_exhausted


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_the_fastest_of_all_on_machines_that_are_drawn(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(sys.modules[__name__], "FREED_GIB", {one: draw.uniform(0.1, 2.5) for one in MODULES})
    monkeypatch.setattr(sys.modules[__name__], "ADDED", {one: draw.uniform(0, 0.12) for one in MODULES})
    budgets = [19 * GIB, round(17.5 * GIB), 16 * GIB]
    result, _ = find(SPACE, [19, 17.5, 16], limit=24)
    samples = [take(one) for one in list_all(SPACE)]
    for budget in budgets:
        (fastest,) = result.list_fastest(budget)
        assert result.samples[fastest].ratio == min(one.ratio for one in samples if one.peak_bytes <= budget)


def test_it_ends_when_no_estimate_is_below_the_fastest_that_fits():
    # A layer norm that runs again frees half a GiB for 1%, and nothing is cheaper.
    result, machine = find(SPACE, [19.5])
    assert [one.name for one in result.list_fastest(round(19.5 * GIB))] in (["megatron:core_attn"], ["recompute:layernorm"])
    fastest = result.samples[result.list_fastest(round(19.5 * GIB))[0]].ratio
    assert fastest == pytest.approx(1.01)
    assert len(machine.rounds) == 1


def test_the_limit_is_kept_and_said():
    result, machine = find(SPACE, [15.5, 14.2], limit=11)
    assert result.tried == 11
    assert not result.is_exhausted
    assert sum(map(len, machine.rounds)) == 11
    few, _ = find(SPACE, [15.5], limit=3)
    assert few.tried == 3
    assert not few.is_exhausted
    # All that was left of the first round is a recompute that none of the sets would need.
    cut, _ = find(SPACE, [19.5], limit=7)
    assert not cut.is_exhausted
    assert find(SPACE, [19.5], limit=8)[0].is_exhausted


def test_nothing_is_measured_twice_and_each_round_has_two_of_each_budget_at_most():
    result, machine = find(SPACE, [17.5, 15.5, 14.2])
    names = [name for one in machine.rounds for name in one]
    assert len(names) == len(set(names))
    assert len(machine.rounds) > 1
    assert all(len(one) <= 6 for one in machine.rounds[1:])
    assert {setting.name for setting in result.samples} == set(names)


def test_what_recompute_spares_does_not_leave_beside_it():
    space = SearchSpace(modules=("core_attn", "expert_fc1"), recomputes=(("core_attn",),), has_fraction=False)
    measured = []

    def measure(settings):
        measured.extend(settings)
        return Measured(
            {one: Sample(1 + len(one.modules) / 100, 20 * GIB - len(one.modules) * GIB) for one in (NOTHING, *settings)}, {}
        )

    search(space, [17 * GIB], nothing=NOTHING, limit=100, measure=measure)
    assert not [one.name for one in measured if "core_attn" in one.modules and one.recompute]
    assert parse_setting("megatron:expert_fc1/core_attn") in measured


def test_what_fails_is_left_out_and_counts_as_tried():
    result, machine = find(SPACE, [16.5], failing=["megatron:expert_fc1", "recompute:moe_act"])
    assert set(result.failures) == {parse_setting("megatron:expert_fc1"), parse_setting("recompute:moe_act")}
    later = [name for one in machine.rounds[1:] for name in one]
    assert later
    assert not [name for name in later if "expert_fc1" in name or "/moe_act" in name]
    assert result.tried == sum(map(len, machine.rounds))


def test_where_nothing_itself_fails_the_search_ends():
    machine = Machine()

    def measure(settings):
        found = machine.measure(settings)
        return Measured({}, dict.fromkeys(found.samples, "no GPU"))

    result = search(SPACE, [GIB], nothing=NOTHING, limit=100, measure=measure)
    assert len(machine.rounds) == 1
    assert NOTHING not in result.failures
    assert result.list_fastest(GIB) == []


def test_where_nothing_is_expected_to_fit_what_keeps_least_is_tried():
    result, machine = find(SPACE, [13])
    assert machine.rounds[1] == ["megatron:qkv_linear+core_attn+attn_proj+expert_fc1+moe_act/moe_act"]
    assert result.list_fastest(13 * GIB)


# The report.


def summarize(name, ratio, peak_gib):
    worst = Measurement(step_seconds=(ratio,), peak_allocated_bytes=round(peak_gib * GIB))
    setting = parse_setting(name)
    return Summary(setting=setting, process=ProcessKind.MEGATRON, step_seconds=(ratio,), ratios=(ratio,), worst=worst)


def test_what_was_found_is_measured_again_and_the_same_modules_by_our_engine():
    space = dataclasses.replace(SPACE, modules=("core_attn", "attn_proj"))
    result, _ = find(space, [18.5, 14])
    found = [one.name for budget in result.budgets_bytes for one in result.list_fastest(budget, count=2)]
    assert {name.partition(":")[0] for name in found} == {"megatron", "recompute"}
    ours = [name.replace("megatron:", "ours:") for name in found if name.startswith("megatron:")]
    assert [one.name for one in list_candidates(result)] == list(dict.fromkeys((*found, *ours)))


def show_rows(result, summaries):
    """Return the cells of the table's rows, and all of its text."""
    console = Console(width=200, file=io.StringIO())
    console.print(build_search_table(result, summaries))
    shown = console.file.getvalue()
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines], shown


def test_the_two_fastest_of_each_budget_are_measured_again_and_the_faster_that_still_fits_is_named():
    result, _ = find(SPACE, [18.5, 1])
    first, second, *_ = list_candidates(result)
    rows, shown = show_rows(result, [summarize(first.name, 1.02, 18.6), summarize(second.name, 1.03, 18.4)])
    sample = result.samples[first]
    few = ["18.50 GiB", first.name, f"{sample.ratio:.3f}", f"{sample.peak_bytes / GIB:.2f} GiB"]
    # The first no longer fits.
    assert rows == [[*few, second.name, "1.030", "18.40 GiB"], ["1.00 GiB", "-", "-", "-", "-", "-", "-"]]
    assert f"{result.tried} settings of {result.possible} tried in {result.rounds} round" in shown
    assert show_rows(result, [])[0][0] == [*few, "-", "-", "-"]


def test_the_fastest_with_all_steps_is_of_all_of_megatrons_settings_that_were_measured():
    result, _ = find(SPACE, [18.5])
    first, *_ = list_candidates(result)
    others = [
        summarize("recompute:moe", 1.190, 14),
        summarize("ours:core_attn", 1.001, 15),
        summarize("save_on_cpu", 1.002, 15),
        summarize("megatron:router", 1.003, 18.6),
    ]
    by_hand = dataclasses.replace(summarize("megatron:expert_fc1/moe_act", 1.054, 16), repeats=2, missed_repeats=1)
    rows, _ = show_rows(result, [summarize(first.name, 1.2, 18), *others, by_hand])
    assert rows[0][1] == first.name
    assert rows[0][4:] == ["megatron:expert_fc1/moe_act, 1 of 2 repeats", "1.054", "16.00 GiB"]
    assert "| megatron:expert_fc1/moe_act, 1 of 2 repeats | 1.054 | 16.00 GiB |" in format_search(result, [*others, by_hand])
    rows, _ = show_rows(result, [summarize(first.name, 1.2, 18), *others])
    assert rows[0][4:] == ["recompute:moe", "1.190", "14.00 GiB"]


def test_a_search_in_which_nothing_could_be_measured_says_so():
    space = SearchSpace(modules=("core_attn",), recomputes=(("moe",),), has_fraction=False)
    crashed, _ = find(space, [18], failing=["megatron:core_attn", "recompute:moe"])
    assert describe_search(crashed) == "2 settings of 3 tried in 1 round, and none could be measured: refused."

    def measure(settings):
        return Measured({}, dict.fromkeys((NOTHING, *settings), "out of memory."))

    without = search(SPACE, [18 * GIB], nothing=NOTHING, limit=24, measure=measure)
    said = "tried in 1 round, and none could be measured: out of memory."
    assert describe_search(without) == f"8 settings of {without.possible} {said}"
    # Neither its limit nor what was left ended it.
    assert not without.is_exhausted
    assert format_search(without, []).startswith("8 settings of ")


def test_the_page_and_the_json_have_all_that_was_tried():
    result, _ = find(SPACE, [17.5], failing=["megatron:moe_act"], limit=9)
    page = format_search(result, [])
    assert page.startswith("9 settings of ")
    assert "1 of them failed; it ended since its limit was reached." in page
    assert "| megatron:moe_act | refused | - |" in page
    assert sum(line.startswith(("| megatron:", "| recompute:")) for line in page.splitlines()) == 9
    fields = json.loads(json.dumps(to_fields(result)))
    assert fields["tried"] == len(fields["samples"]) + len(fields["failures"]) == 9
    assert fields["samples"]["recompute:full"] == {"ratio": pytest.approx(1.3), "peak_bytes": 14 * GIB}
    assert describe_search(find(SPACE, [19.5])[0]).endswith("it ended since nothing that was left promised to be faster.")


# What is searched, and how it is measured.


def test_the_space_has_what_megatron_accepts_and_what_says_something_about_the_model():
    moe = make_space({"num_moe_experts": 4, "moe_grouped_gemm": True})
    assert moe.modules == ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
    norms_beside = (("layernorm", "moe_act"), ("layernorm", "moe"))
    assert moe.recomputes == (("full",), ("layernorm",), ("moe_act",), ("moe",), *norms_beside, ("core_attn",))
    dense = make_space({})
    assert dense.modules == ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
    assert not moe.has_fraction  # megatron-core 0.16.1


def test_each_round_has_a_process_of_megatrons_kind_few_steps_and_its_own_nothing(tmp_path, monkeypatch):
    calls = []

    def run_sessions(job, runs, *, kind, first_session, log_folder, on_message):
        calls.append((job.steps_of_run, kind, first_session, [run.setting.name for run in runs]))
        assert log_folder.is_dir()
        for run in runs:
            failure = "refused" if run.setting.recompute else ""
            seconds = 0.5 if run.setting == NOTHING else 0.6
            measurement = None if failure else Measurement(step_seconds=(seconds,), peak_allocated_bytes=7)
            yield Outcome(setting=run.setting, repeat=0, session=first_session + 1, measurement=measurement, failure=failure)

    monkeypatch.setattr(search_runs_module, "run_sessions", run_sessions)
    job = Job(source="x.sh", file_flags=(), warmup=5, steps=50, plan_folder=tmp_path, trace_folder=tmp_path)
    runs = SearchRuns(job, tmp_path / "search")
    assert runs.job.trace_folder is None
    one, full = parse_setting("megatron:core_attn"), parse_setting("recompute:full")
    found = runs.measure([one, full])
    assert found.samples == {NOTHING: Sample(1.0, 7), one: Sample(1.2, 7)}
    assert found.failures == {full: "refused"}
    runs.measure([one])
    assert calls == [
        (4, ProcessKind.MEGATRON, 0, ["nothing", "megatron:core_attn", "recompute:full"]),
        (4, ProcessKind.MEGATRON, 2, ["nothing", "megatron:core_attn"]),
    ]
