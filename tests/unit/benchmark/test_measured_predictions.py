"""What is predicted of settings that were measured: docs/results/predictions_h200_202611.md, and two pages of H100s."""

from pathlib import Path

import pytest

from fgoffload.benchmark.forecaster import Forecaster
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.prediction import Source
from fgoffload.benchmark.settings import Setting, System, parse_setting
from fgoffload.benchmark.simulation import make_plan, predict
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.planner.host_slowdown import fit_slowdown, slow_down
from fgoffload.planner.late_host import HostGuess, assume_host
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.profile import Profile

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
PAGE, H100_PAGE = RESULTS / "predictions_h200_202611.md", RESULTS / "w2_moe_h100_202611.md"
ACCURACY_PAGE = ROOT / "docs" / "planner" / "accuracy.md"
PROBES = ("ours:core_attn+attn_proj+expert_fc1", "ours:core_attn+attn_proj")
"""Settings of one run by which its host is judged: the first that it has."""
TWO_STAGES_PAGE = RESULTS / "w2_1f1b_h100_202611.md"
PLANS = RESULTS / "plans"
PROFILES = RESULTS / "profiles"
H100_RUNS = {
    "2026-11-24, H100": "w2_moe_h100",
    "2026-11-24, H100, second": "w2_moe_h100_second",
    "2026-11-25, H100, third": "w2_moe_h100_third",
    "2026-11-25, H100, fourth": "w2_moe_h100_fourth",
    "2026-11-25, H100, fifth": "w2_moe_h100_fifth",
    "2026-11-25, H100, latent": "mla_moe_h100",
    "2026-11-25, H100, dense": "llama3_8b_layers_h100",
    "2026-11-25, H100, latent, second": "mla_moe_h100",
    "2026-11-25, H100, dense, second": "llama3_8b_layers_h100",
    "2026-11-25, H100, sixth": "w2_moe_h100_sixth",
    "2026-11-25, H100, seventh": "w2_moe_h100_seventh",
    "2026-11-26, H100, eighth": "w2_moe_h100_eighth",
    "2026-11-26, H100, traced": "w2_moe_h100_eighth",
    "2026-11-26, H100, tenth": "w2_moe_h100_tenth",
    "2026-11-26, H100, latent, third": "mla_moe_h100_second",
    "2026-11-26, H100, dense, third": "llama3_8b_layers_h100_second",
}
"""By run, its profile. From the third on they have steps that were compared, and from the fifth on the plain step of all their
`nothing`, as the benchmark writes it. The second of the two other models, and what was traced, ran on another machine than its
profile."""
TWO_STAGES = ("2026-11-24, 1F1B", "2026-11-24, 1F1B, later", "2026-11-24, 1F1B, four runs", "2026-11-25, 1F1B")
"""Runs on two H100, on four machines, all but the first with the plan of the first."""
TWO_STAGES_AGAIN = "2026-11-25, 1F1B, second profile"
"""On a fifth machine, with a profile and a plan of its own."""
TWO_STAGES_ON_H200 = "2026-11-26, 1F1B, H200"
"""On two H200, with a profile and a plan of its own, and the plan before."""
ON_TWO_STAGES = (*TWO_STAGES, TWO_STAGES_AGAIN, TWO_STAGES_ON_H200)
GIB = 2**30
HEADINGS = {Source.TABLE: "## From the hardware table", Source.PROFILE: "## From profiles"}
CUT_OFF = {Source.TABLE: "### Cut off, from the hardware table", Source.PROFILE: "### Cut off, from its profile"}
"""Of a run that ended in its second repeat, five steps a setting, and of one whose host was late in the first of two."""
ON_H100 = {Source.TABLE: "### From the hardware table of an H100", Source.PROFILE: "### From the profile of the run on an H100"}
ON_TWO_DEVICES = {
    Source.TABLE: "### From the hardware table of two devices",
    Source.PROFILE: "### From the profiles of two stages",
}
RUN_PROFILES = {
    **H100_RUNS,
    **dict.fromkeys(TWO_STAGES, "w2_moe_1f1b_h100"),
    TWO_STAGES_AGAIN: "w2_moe_1f1b_h100_second",
    TWO_STAGES_ON_H200: "w2_moe_1f1b",
    "2026-11-23, third": "w2_moe_third",
    "2026-11-23, fourth": "w2_moe_fourth",
    "2026-11-23, fifth": "w2_moe_fifth",
    "2026-11-23, sixth": "w2_moe_sixth",
    "2026-11-24, seventh": "w2_moe_seventh",
    "2026-11-24, eighth": "w2_moe_seventh",  # its plans are from there
    "2026-11-26, ninth": "w2_moe_ninth",
    "2026-11-23, 4 sequences": "w2_moe_4_sequences",
}
"""The profiles of W2 by run; of all other models there is one."""
FITTED = {("llama3_8b_layers", "nothing"), ("llama3_8b_layers", "recompute:full"), ("mla_moe", "recompute:full")}
"""What `Efficiency.matmul` and `Efficiency.rerun_extra` were set by, of the first day. The other rows judge them."""

ABOVE_CUT_OFF = {
    Source.TABLE: set(),
    Source.PROFILE: {"plan:w2_16.5GiB_second", "plan:w2_16.5GiB_seventh", "ours:core_attn+attn_proj+expert_fc1"},
}
"""Settings that are predicted worse than the limits, since the host was later than the device in those runs."""
_FIRST_H100_RUN, _SECOND_H100_RUN, _THIRD_H100_RUN, _, _FIFTH_H100_RUN, *_LATER_H100_RUNS = H100_RUNS
_, _, _, _, _, _SEVENTH_H100_RUN, *_ = _LATER_H100_RUNS
ABOVE_ON_H100 = {
    Source.TABLE: {
        (_THIRD_H100_RUN, "plan:w2_16.5GiB_h100_third"),
        (_THIRD_H100_RUN, "ours:core_attn+attn_proj+expert_fc1"),
    },
    Source.PROFILE: {
        (_SEVENTH_H100_RUN, "ours:expert_fc1/layernorm+moe_act"),
        (_FIFTH_H100_RUN, "recompute:layernorm+moe"),
        *((_FIRST_H100_RUN, f"plan:w2_{size}GiB_h100") for size in (14.6, 16.5)),
        *((_THIRD_H100_RUN, f"plan:w2_{size}GiB_h100_third") for size in (16.5, 18.9)),
        (_THIRD_H100_RUN, "ours:core_attn+attn_proj+expert_fc1"),
        *((_SECOND_H100_RUN, f"plan:w2_{size}GiB_h100_second") for size in (14.6, 16.5, 18.9, 20.2)),
        (_SECOND_H100_RUN, "ours:core_attn+attn_proj+expert_fc1"),
        (_SECOND_H100_RUN, "ours:qkv_linear+core_attn+attn_proj/layernorm+moe"),
        (_SECOND_H100_RUN, "ours:expert_fc1"),
        (_SECOND_H100_RUN, "recompute:full"),
    },
}
"""The same, by run, of those on one H100."""
ABOVE_ON_TWO_DEVICES = {
    Source.TABLE: {(run, "plan:w2_1f1b_18.7GiB_h100") for run in TWO_STAGES[1:4]},
    Source.PROFILE: {(TWO_STAGES[0], "plan:w2_1f1b_18.7GiB_h100")},
}
"""The same, by run, of those on two."""


def read_rows(heading, page=PAGE):
    """Return the cells of a table of a page, without backticks and asterisks."""
    section = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| 2026")]
    return [tuple(cell.strip().replace("`", "").replace("*", "") for cell in line.strip("|").split("|")) for line in lines]


ROWS = {source: read_rows(HEADINGS[source]) for source in Source}
CUT_OFF_ROWS = {source: read_rows(CUT_OFF[source]) for source in Source}
H100_ROWS = {source: read_rows(ON_H100[source], H100_PAGE) for source in Source}
TWO_STAGES_ROWS = {source: read_rows(ON_TWO_DEVICES[source], TWO_STAGES_PAGE) for source in Source}
ALL_ROWS = (ROWS, CUT_OFF_ROWS, H100_ROWS, TWO_STAGES_ROWS)


def make_forecaster(run, model, flags):
    """Return what predicts a model from the table and, where it was measured so, from its profile."""
    path = ROOT / "arguments" / f"{model}.sh"
    file_flags = tuple(read_argument_file(path, variables={}))
    job = Job(
        source=path.name,
        file_flags=file_flags,
        typed_flags=tuple(flags.split()),
        world_size=2 if run in ON_TWO_STAGES else 1,
        warmup=1,
        steps=1,
        plan_folder=Path(),
    )
    profile = Profile.load(PROFILES / f"{RUN_PROFILES.get(run, model)}.json.gz")
    forecaster = Forecaster(job, profile=profile)
    is_of_h100 = run in (*H100_RUNS, *ON_TWO_STAGES) and run != TWO_STAGES_ON_H200
    forecaster.meet("NVIDIA H100 80GB HBM3" if is_of_h100 else "NVIDIA H200")
    return forecaster


@pytest.fixture(scope="module")
def forecasters():
    """Return what predicts, by run, model and the flags typed beside its file: each one's ranks are built once."""
    keys = dict.fromkeys(row[:3] for rows in ALL_ROWS for source in Source for row in rows[source])
    return {key: make_forecaster(*key) for key in keys}


def find_setting(name):
    system, _, plan = name.partition(":")
    if system != System.PLAN.value:
        return parse_setting(name)
    return Setting(system=System.PLAN, plan=PLANS / f"{plan}.json")


def predict_cells(forecaster, row, source):
    """Return the cells of a row, with what is predicted now, and the larger error in parts of its limit."""
    day, model, flags, name, step_ms, _, peak_gib, _ = row
    prediction = forecaster.predict(find_setting(name)).predictions[source]
    step, peak = prediction.step_s * 1e3, prediction.peak_bytes / GIB
    step_error, peak_error = step / float(step_ms) - 1, peak / float(peak_gib) - 1
    cells = (
        *(day, model, flags, name),
        *(step_ms, f"{step:.1f} {step_error:+.1%}"),
        *(peak_gib, f"{peak:.2f} {peak_error:+.1%}"),
    )
    return cells, max(abs(step_error) / source.limits.step, abs(peak_error) / source.limits.peak)


def check_rows(rows, source, forecasters):
    """Check that rows say what is predicted now, worst first, and return the runs and settings above the limits."""
    found = [predict_cells(forecasters[row[:3]], row, source) for row in rows]
    assert [cells for cells, _ in found] == rows
    badness = [part for _, part in found]
    assert badness == sorted(badness, reverse=True)
    return {(row[0], row[3]) for row, part in zip(rows, badness, strict=True) if part > 1}


def list_settings(above):
    return {setting for _, setting in above}


@pytest.mark.parametrize("source", Source)
def test_the_page_says_what_is_predicted_now_worst_first_and_all_is_within_the_limits(source, forecasters):
    assert check_rows(ROWS[source], source, forecasters) == set()


@pytest.mark.parametrize("source", Source)
def test_what_was_cut_off_is_there_with_what_is_above_the_limits(source, forecasters):
    assert list_settings(check_rows(CUT_OFF_ROWS[source], source, forecasters)) == ABOVE_CUT_OFF[source]


@pytest.mark.parametrize("source", Source)
def test_the_runs_on_an_h100_have_all_their_settings_with_what_is_above_the_limits(source, forecasters):
    assert [sum(row[0] == run for row in H100_ROWS[source]) for run in H100_RUNS] == [
        11,
        14,
        14,
        13,
        12,
        6,
        4,
        7,
        6,
        14,
        16,
        16,
        6,
        19,
        9,
        6,
    ]
    assert check_rows(H100_ROWS[source], source, forecasters) == ABOVE_ON_H100[source]


@pytest.mark.parametrize(("source", "count"), [(Source.TABLE, 16), (Source.PROFILE, 10)])
def test_the_runs_of_two_stages_have_all_their_settings_with_what_is_above_the_limits(source, count, forecasters):
    assert len(TWO_STAGES_ROWS[source]) == count
    assert check_rows(TWO_STAGES_ROWS[source], source, forecasters) == ABOVE_ON_TWO_DEVICES[source]


@pytest.mark.parametrize("source", Source)
def test_three_models_have_four_settings_and_plans_among_them(source):
    rows = ROWS[source]
    for model, plans in (("llama3_8b_layers", 2), ("mla_moe", 2 if source is Source.TABLE else 1), ("w2_moe", 4)):
        names = {row[3] for row in rows if row[1] == model}
        assert sum(not name.startswith("plan:") for name in names) >= 4
        assert sum(name.startswith("plan:") for name in names) >= plans


def test_each_plan_that_is_kept_was_measured():
    measured = {row[3] for rows in ALL_ROWS for row in rows[Source.TABLE] if row[3].startswith("plan:")}
    assert measured == {f"plan:{path.stem}" for path in PLANS.glob("*.json")}


def judge_host(key, rows, forecaster):
    """Return the cells of a run in the table of hosts; None where it lacks one of the settings that are needed."""
    taken_s = {row[3]: float(row[4]) / 1e3 for row in rows}
    probe = next((name for name in PROBES if name in taken_s), None)
    if probe is None:
        return None
    ranks = assume_host(forecaster._make_profile_ranks(), HostGuess.IN_TIME)
    plan = make_plan(ranks, find_setting(probe))
    step = ComparedStep.from_plan(plan, step_s=taken_s[probe], keeping_step_s=taken_s["nothing"])
    slowdown = fit_slowdown(ranks, [step])
    others = [name for name in taken_s if name not in (probe, "nothing")]
    errors = [
        [predict(one, find_setting(name), like=forecaster._like).step_s / taken_s[name] - 1 for name in others]
        for one in (ranks, slow_down(ranks, slowdown))
    ]
    worst = (f"{max(found, key=abs):+.1%}" for found in errors)
    counts = (f"{sum(abs(error) > 0.04 for error in found)} of {len(found)}" for found in errors)
    return (key[0], key[1], f"{slowdown:.1%}", *counts, *worst)


def test_the_page_says_how_late_the_host_of_each_run_was_by_one_of_its_settings(forecasters):
    rows = {}
    for tables in ALL_ROWS:
        for row in tables[Source.PROFILE]:
            rows.setdefault(row[:3], []).append(row)
    found = [judge_host(key, own, forecasters[key]) for key, own in rows.items()]
    assert read_rows("## How late the host is", ACCURACY_PAGE) == sorted(cells for cells in found if cells is not None)


def test_most_rows_are_not_those_that_the_efficiencies_were_set_by():
    first = min(row[0] for row in ROWS[Source.TABLE])
    fitted = [row for row in ROWS[Source.TABLE] if (row[1], row[3]) in FITTED and row[0] == first]
    assert len(fitted) == len(FITTED)
    assert len(ROWS[Source.TABLE]) >= 15 * len(fitted)
