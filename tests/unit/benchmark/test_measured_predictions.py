"""What the hardware table says of settings that were measured: the first table of docs/results/predictions_h200_202611.md."""

from pathlib import Path

import pytest

from fgoffload.benchmark.forecaster import Forecaster
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.prediction import Source
from fgoffload.benchmark.settings import Setting, System, parse_setting
from fgoffload.integrations.megatron.argument_files import read_argument_file

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "predictions_h200_202611.md"
PLANS = ROOT / "docs" / "results" / "plans"
DEVICE = "NVIDIA H200"
GIB = 2**30
FITTED = {("llama3_8b_layers", "nothing"), ("llama3_8b_layers", "recompute:full"), ("mla_moe", "recompute:full")}
"""What `Efficiency.matmul` and `Efficiency.rerun_extra` were set by. The other rows judge them."""


def read_rows():
    """Return the cells of the page's first table, without backticks."""
    section = PAGE.read_text(encoding="utf-8").partition("## From the hardware table")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines]


ROWS = read_rows()
MODELS = list(dict.fromkeys(row[:2] for row in ROWS))


@pytest.fixture(scope="module")
def forecasters():
    """Return what predicts, by the model's name and the flags typed beside its file: each one's ranks are built once."""
    found = {}
    for model, flags in MODELS:
        path = ROOT / "arguments" / f"{model}.sh"
        file_flags = tuple(read_argument_file(path, variables={}))
        job = Job(
            source=path.name, file_flags=file_flags, typed_flags=tuple(flags.split()), warmup=1, steps=1, plan_folder=Path()
        )
        found[model, flags] = Forecaster(job)
        found[model, flags].meet(DEVICE)
    return found


def find_setting(name):
    system, _, plan = name.partition(":")
    if system != System.PLAN.value:
        return parse_setting(name)
    return Setting(system=System.PLAN, plan=PLANS / f"{plan}.json")


def predict_cells(forecaster, row):
    """Return the cells of a row, with what is predicted now."""
    model, flags, name, step_ms, _, peak_gib, _ = row
    prediction = forecaster.predict(find_setting(name)).predictions[Source.TABLE]
    step, peak = prediction.step_s * 1e3, prediction.peak_bytes / GIB
    step_error, peak_error = step / float(step_ms) - 1, peak / float(peak_gib) - 1
    return (
        *(model, flags, name),
        *(step_ms, f"{step:.1f} {step_error:+.1%}"),
        *(peak_gib, f"{peak:.2f} {peak_error:+.1%}"),
    ), max(abs(step_error) / Source.TABLE.limits.step, abs(peak_error) / Source.TABLE.limits.peak)


def test_the_page_says_what_is_predicted_now_worst_first_and_within_the_limits(forecasters):
    found = [predict_cells(forecasters[row[:2]], row) for row in ROWS]
    assert [cells for cells, _ in found] == ROWS
    badness = [part for _, part in found]
    assert badness == sorted(badness, reverse=True)
    assert badness[0] <= 1


def test_three_models_have_four_settings_or_more_and_one_has_the_four_plans():
    models = [row[0] for row in ROWS]
    assert set(models) == {"llama3_8b_layers", "mla_moe", "w2_moe"}
    assert all(models.count(model) >= 4 for model in models)
    plans = {f"plan:{path.stem}" for path in PLANS.glob("*.json")}
    assert len(plans) == 4
    assert {row[2] for row in ROWS if row[2].startswith("plan:")} == plans


def test_most_rows_are_not_those_that_the_efficiencies_were_set_by():
    fitted = [row for row in ROWS if (row[0], row[2]) in FITTED]
    assert len(fitted) == len(FITTED)
    assert len(ROWS) >= 7 * len(fitted)
