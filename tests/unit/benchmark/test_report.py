"""Tables, CSV and JSON, and the comparison of bits."""

import csv
import io
import json

import pytest
from rich.console import Console

from fgoffload.benchmark.measurement import Measurement, Outcome, summarize
from fgoffload.benchmark.prediction import PREDICTION_COLUMNS, Forecast, Prediction, Source
from fgoffload.benchmark.report import (
    HEADINGS,
    INTERVALS,
    Workload,
    build_bits_table,
    build_budget_table,
    build_times_table,
    compare_bits,
    format_csv,
    format_json,
    format_markdown,
    list_rows,
)
from fgoffload.benchmark.settings import NOTHING, PROFILE, ProcessKind, parse_setting
from fgoffload.benchmark.steps import StepRecord
from fgoffload.benchmark.surroundings import Surroundings

GIB = 2**30
FULL = parse_setting("recompute:full")
OURS = parse_setting("ours:core_attn")
MEGATRON = parse_setting("megatron:core_attn")
PROCESSES = [ProcessKind.MAIN, ProcessKind.MEGATRON]

WORKLOAD = Workload(
    arguments_file="x.sh",
    layers=6,
    dtype="bfloat16",
    tokens=1000,
    model_flop=4_000_000,
    world_size=2,
    device_flop_per_s=10e6,
)
SURROUNDINGS = Surroundings(
    device="A device",
    driver="1.2",
    python="3.11.1",
    packages={"torch": "2.11", "megatron-core": "0.16.1"},
    cuda="13.0",
    cpus=2,
    variables={"NVTE_DEBUG": "1"},
)


def outcome(setting, *seconds, repeat=0, session=0, failure="", bits=(), **numbers):
    measurement = Measurement(step_seconds=seconds, **numbers) if seconds else None
    return Outcome(setting=setting, repeat=repeat, session=session, measurement=measurement, failure=failure, bits=bits)


OUTCOMES = [
    outcome(NOTHING, 0.4, 0.5, 0.6, peak_allocated_bytes=20 * GIB, peak_reserved_bytes=21 * GIB),
    outcome(
        OURS,
        0.55,
        peak_allocated_bytes=18 * GIB,
        host_bytes=3 * GIB,
        d2h_bytes=2 * GIB,
        prefetch_misses=4,
    ),
    outcome(FULL, failure="refused [bold]"),
    outcome(NOTHING, 0.5, session=1, peak_allocated_bytes=20 * GIB),
    outcome(MEGATRON, 0.75, session=1, peak_allocated_bytes=19 * GIB),
]


FORECASTS = {
    OURS: Forecast(
        predictions={
            Source.TABLE: Prediction(step_s=0.55 * 1.02, ratio=1.0625, peak_bytes=17 * GIB, static_bytes=9 * GIB),
            Source.PROFILE: Prediction(step_s=0.6, ratio=1.125, peak_bytes=16 * GIB, static_bytes=9 * GIB),
        }
    )
}


def show(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_the_cells_of_a_setting_have_its_numbers_with_their_units():
    nothing, ours, full, again, megatron = list_rows(summarize(OUTCOMES, PROCESSES), WORKLOAD, FORECASTS)
    # p20 of 400, 500, 600 is 0.4 of the way to 500. MFU: 4e6 operations in 0.5 s on two devices of 10e6 a second.
    assert nothing == (
        *("nothing", "500.0 (440.0 560.0)", "1.000", "-", "20.00 GiB", "-"),
        *("21.00 GiB", "-", "-", "2000", "40.0%"),
    )
    assert ours == (
        *("ours:core_attn", "550.0 (550.0 550.0)", "1.100", "1.125", "18.00 GiB", "16.00 GiB"),
        *("-", "3.00 GiB", "2.00 GiB", "1818", "36.4%"),
    )
    table_alone = {OURS: Forecast(predictions={Source.TABLE: FORECASTS[OURS].predictions[Source.TABLE]})}
    assert list_rows(summarize(OUTCOMES, PROCESSES), WORKLOAD, table_alone)[1][3:6] == ("1.062", "18.00 GiB", "17.00 GiB")
    assert full == ("recompute:full", "not measured: refused [bold]", *"---------")
    assert again[0] == "nothing (megatron)"
    assert megatron[:3] == ("megatron:core_attn", "750.0 (750.0 750.0)", "1.500")
    assert {len(cells) for cells in (nothing, ours, full, again, megatron)} == {len(HEADINGS)}


def test_a_device_that_the_table_does_not_know_has_no_utilization():
    unknown = Workload(arguments_file="x.sh", layers=1, dtype="float32", tokens=10, model_flop=10, world_size=1)
    assert unknown.find_utilization(1.0) is None
    assert list_rows(summarize(OUTCOMES, PROCESSES), unknown)[0][-1] == "-"


def test_two_repeats_are_both_shown_and_three_have_an_interval():
    two = [outcome(NOTHING, 1.0), outcome(OURS, 1.1), outcome(NOTHING, 2.0, repeat=1), outcome(OURS, 2.4, repeat=1)]
    assert list_rows(summarize(two, PROCESSES), WORKLOAD)[1][2] == "1.100 1.200"
    three = [*two, outcome(NOTHING, 1.0, repeat=2), outcome(OURS, 1.3, repeat=2)]
    cell = list_rows(summarize(three, PROCESSES), WORKLOAD)[1][2]
    ratio, low, high = cell.replace("[", "").replace("]", "").split()
    assert ratio == f"{(1.1 * 1.2 * 1.3) ** (1 / 3):.3f}" == "1.197"
    assert 0.9 < float(low) < 1.1
    assert 1.3 < float(high) < 1.5


def test_tables_with_intervals_say_of_what_they_are():
    runs = [outcome(setting, 1.0 + repeat / 100, repeat=repeat) for repeat in range(3) for setting in (NOTHING, OURS)]
    for outcomes, is_said in ((runs, True), (runs[:4], False), (runs[::2], False)):
        summaries = summarize(outcomes, PROCESSES)
        page = format_markdown(summaries, WORKLOAD, SURROUNDINGS)
        shown = show(build_times_table(summaries, WORKLOAD, SURROUNDINGS))
        assert [INTERVALS in page, "Over nothing: the geometric mean of the repeats" in shown] == [is_said, is_said]


def test_the_table_shows_what_failed_and_why_below_it_as_it_was_said():
    shown = show(build_times_table(summarize(OUTCOMES, PROCESSES), WORKLOAD, SURROUNDINGS))
    assert "x.sh: 6 layers on 2 x A device" in shown
    assert "torch 2.11, megatron-core 0.16.1, driver 1.2" in shown
    assert "recompute:full: refused [bold]" in shown
    assert "megatron:core_attn" in shown


def test_a_setting_that_failed_in_a_repeat_says_in_how_many_it_was_measured_and_why():
    sizes = {"peak_allocated_bytes": 18 * GIB}
    outcomes = [
        *(outcome(NOTHING, 1.0), outcome(OURS, 1.1, **sizes), outcome(FULL, 1.2, **sizes)),
        outcome(NOTHING, 1.0, repeat=1),
        outcome(OURS, repeat=1, failure="out of [memory]"),
        # A session that is over begins with another `nothing`, which may fail where the first did not.
        outcome(NOTHING, repeat=1, session=1, failure="no more"),
        outcome(FULL, 1.3, repeat=1, **sizes),
    ]
    summaries = summarize(outcomes, [ProcessKind.MAIN, ProcessKind.MAIN])
    nothing, ours, full = list_rows(summaries, WORKLOAD)
    assert (nothing[1], full[1]) == ("1000.0 (1000.0 1000.0)", "1250.0 (1220.0 1280.0)")
    assert ours[1:3] == ("1100.0 (1100.0 1100.0), 1 of 2 repeats", "1.100")
    shown = show(build_times_table(summaries, WORKLOAD, SURROUNDINGS))
    page = format_markdown(summaries, WORKLOAD, SURROUNDINGS)
    for text in (shown, page):
        assert "ours:core_attn: measured in 1 of 2 repeats: out of [memory]" in text
        assert "nothing: measured in all repeats, where another run of it failed: no more" in text
        assert "recompute:full:" not in text
    assert "1.100 ours:core_attn, 1 of 2 repeats" in show(build_budget_table(summaries, [18 * GIB]))
    # One that crashed does not come again, so that the third repeat does not know of it.
    assert summarize(outcomes, [ProcessKind.MAIN] * 2, repeats=3)[1].missed_repeats == 2
    rows = list(csv.DictReader(io.StringIO(format_csv(outcomes, [ProcessKind.MAIN] * 2, WORKLOAD))))
    of_ours = [(row["repeat"], row["over_nothing"], row["failure"]) for row in rows if row["setting"] == OURS.name]
    assert of_ours == [("0", "1.1", ""), ("1", "", "out of [memory]")]


def test_the_table_of_budgets_names_the_fastest_of_each_system():
    shown = show(build_budget_table(summarize(OUTCOMES, PROCESSES), [18 * GIB, 20 * GIB]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "GiB" in line]
    assert rows == [
        ["20.00 GiB", "1.000 nothing", "-", "1.500 megatron:core_attn", "1.100 ours:core_attn"],
        ["18.00 GiB", "-", "-", "-", "1.100 ours:core_attn"],
    ]


def test_a_page_has_the_table_as_markdown():
    lines = format_markdown(summarize(OUTCOMES, PROCESSES), WORKLOAD, SURROUNDINGS).splitlines()
    assert lines[0] == "x.sh: 6 layers on 2 x A device"
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 5
    assert {line.count("|") for line in rows} == {len(HEADINGS) + 1}


def test_the_csv_has_a_row_for_each_run_with_bytes_and_seconds():
    rows = list(csv.DictReader(io.StringIO(format_csv(OUTCOMES, PROCESSES, WORKLOAD, FORECASTS))))
    assert [(row["setting"], row["process"], row["over_nothing"]) for row in rows] == [
        ("nothing", "main", "1.0"),
        ("ours:core_attn", "main", "1.1"),
        ("recompute:full", "main", ""),
        ("nothing", "megatron", "1.0"),
        ("megatron:core_attn", "megatron", "1.5"),
    ]
    assert rows[0]["step_p20_s"] == "0.44"
    assert (rows[1]["peak_allocated_bytes"], rows[1]["host_bytes"], rows[1]["prefetch_misses"]) == (
        *(str(18 * GIB), str(3 * GIB), "4"),
    )
    assert rows[0]["tokens_per_s"] == "2000.0"
    predicted = {name: rows[1][name] for name in PREDICTION_COLUMNS}
    assert predicted == {
        "table_step_s": "0.561",
        "table_step_error_percent": "2.0",
        "table_over_nothing": "1.0625",
        "table_peak_bytes": str(17 * GIB),
        "table_peak_error_percent": "-5.56",
        "profile_step_s": "0.6",
        "profile_step_error_percent": "9.09",
        "profile_over_nothing": "1.125",
        "profile_peak_bytes": str(16 * GIB),
        "profile_peak_error_percent": "-11.11",
    }
    assert {rows[0][name] for name in PREDICTION_COLUMNS} == {""}
    assert (rows[2]["failure"], rows[2]["step_p50_s"]) == ("refused [bold]", "")


def test_the_json_has_every_step_and_the_flags_of_every_setting():
    document = json.loads(format_json(OUTCOMES, PROCESSES, WORKLOAD, SURROUNDINGS, {"date": "today"}))
    assert document["date"] == "today"
    assert document["surroundings"]["variables"] == {"NVTE_DEBUG": "1"}
    assert document["workload"]["tokens"] == 1000
    first, second, third, *_ = document["runs"]
    assert first["measurement"]["step_seconds"] == [0.4, 0.5, 0.6]
    assert second["flags"][:3] == ["--fine-grained-activation-offloading", "--offload-modules", "core_attn"]
    assert third["measurement"] is None
    assert third["failure"] == "refused [bold]"


def test_a_profile_is_no_row_of_the_tables_and_has_no_rates():
    runs = [outcome(NOTHING, 1.0), outcome(PROFILE, 0.965, peak_allocated_bytes=20 * GIB), outcome(OURS, 1.1)]
    summaries = summarize(runs, PROCESSES)
    assert [cells[0] for cells in list_rows(summaries, WORKLOAD)] == ["nothing", "ours:core_attn"]
    assert "profile" not in format_markdown(summaries, WORKLOAD, SURROUNDINGS)
    _, profile, ours = csv.DictReader(io.StringIO(format_csv(runs, PROCESSES, WORKLOAD)))
    rates = ("over_nothing", "tokens_per_s", "model_flop_utilization")
    assert [profile[name] for name in ("setting", *rates)] == ["profile", "", "", ""]
    assert (profile["step_p50_s"], profile["peak_allocated_bytes"]) == ("0.965", str(20 * GIB))
    assert all(ours[name] for name in rates)


def test_a_profile_that_failed_says_why():
    summaries = summarize([outcome(NOTHING, 1.0), outcome(PROFILE, failure="no memory")], PROCESSES)
    assert list_rows(summaries, WORKLOAD)[1][:2] == ("profile", "not measured: no memory")
    assert "profile: no memory" in show(build_times_table(summaries, WORKLOAD, SURROUNDINGS))


def test_the_json_says_no_flags_of_what_is_not_chosen_by_flags():
    runs = [outcome(PROFILE, 0.5), outcome(parse_setting("budget:1GiB"), 0.5)]
    document = json.loads(format_json(runs, PROCESSES, WORKLOAD, SURROUNDINGS, {}))
    assert [run["flags"] for run in document["runs"]] == [None, None]


# Bits.


def step(loss=1.0, digest="aa"):
    return StepRecord(losses=(loss,), gradient_digests={"0.weight": digest}, seconds=0.1)


def test_settings_are_compared_with_the_first_nothing_of_their_process():
    rows = compare_bits(
        [
            outcome(NOTHING, bits=(step(),)),
            outcome(NOTHING, bits=(step(),)),
            outcome(OURS, bits=(step(),)),
            outcome(FULL, bits=(step(digest="bb"),)),
            # Another process may compute other bits: only within one are they compared.
            outcome(NOTHING, bits=(step(loss=2.0),), session=1),
            outcome(NOTHING, bits=(step(loss=2.5),), session=1),
            outcome(MEGATRON, bits=(step(loss=2.0),), session=1),
        ]
    )
    assert [(row.setting, row.session, row.is_equal) for row in rows] == [
        (NOTHING, 0, True),
        (OURS, 0, True),
        (FULL, 0, False),
        (NOTHING, 1, False),
        (MEGATRON, 1, True),
    ]
    assert rows[2].differences == ("gradients from step 1, 0.weight",)
    assert rows[3].differences == ("losses from step 1, microbatch 1",)


@pytest.mark.parametrize("reference", [outcome(NOTHING, failure="no memory"), None])
def test_what_has_nothing_to_be_compared_with_is_not_equal(reference):
    outcomes = [reference] if reference else []
    rows = compare_bits([*outcomes, outcome(OURS, bits=(step(),))])
    assert [row.failure for row in rows] == [*(["no memory"] if reference else []), "nothing to compare with"]
    assert not any(row.is_equal for row in rows)
    assert not any(row.differences for row in rows)


def test_the_table_of_bits_says_where_they_first_differ():
    rows = compare_bits(
        [
            outcome(NOTHING, bits=(step(), step())),
            outcome(NOTHING, bits=(step(), step())),
            outcome(FULL, bits=(step(), step(loss=3.0, digest="x[/]y"))),
            outcome(OURS, failure="refused [/bold]"),
        ]
    )
    shown = show(build_bits_table(rows, WORKLOAD, SURROUNDINGS))
    assert "nothing, again" in shown
    assert "losses from step 2, microbatch 1; gradients from step 2, 0.weight" in shown
    assert "refused [/bold]" in shown
