"""`fgoffload bench`, from its flags to its files."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import ARGUMENTS
from support.trainings import write_plan

from fgoffload import Action, OffloadPlan
from fgoffload.benchmark import results, search_runs
from fgoffload.benchmark.job import Ready
from fgoffload.benchmark.measurement import Measurement, Outcome
from fgoffload.benchmark.settings import System
from fgoffload.benchmark.steps import StepRecord
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.benchmark.traces import read_events
from fgoffload.cli import main
from fgoffload.integrations.megatron import megatron_engine

REFUSED = [
    ((), "ARGUMENTS.sh is missing. Give a Megatron argument file first, as in: fgoffload bench arguments/tiny_moe.sh."),
    (("none.sh",), "argument file 'none.sh' does not exist. Give a file"),
    ((ARGUMENTS, "--steps", "x"), "--steps 'x' is not a whole number. Give one from 1, as in 10."),
    ((ARGUMENTS, "--warmup", "0"), "--warmup 0 is below 1. Give 1 or more."),
    ((ARGUMENTS, "--repeats", "-1"), "--repeats -1 is below 1. Give 1 or more."),
    ((ARGUMENTS, "--repeats"), "--repeats expected one argument. Give it after the flag, as in --repeats 2."),
    (
        (ARGUMENTS, "--settings"),
        "--settings expected at least one argument. Give it after the flag, as in --settings recompute",
    ),
    ((ARGUMENTS, "--settings", "fast"), "--settings 'fast' is no setting. Give one that begins with nothing, recompute,"),
    (
        (ARGUMENTS, "--settings", "recompute:layernorm+bogus"),
        "--settings 'recompute:layernorm+bogus': 'bogus' is no recompute module. Give some of: layernorm mla_up_proj core_attn",
    ),
    (
        (ARGUMENTS, "--settings", "recompute:full+moe"),
        "--settings 'recompute:full+moe': 'full' is no recompute module. Give some of: ",
    ),
    ((ARGUMENTS, "--settings", "ours:expert_fc1/moe_action"), "'moe_action' is no recompute module. Give some of: "),
    (
        (ARGUMENTS, "--settings", "megatron:expert_fc1+core"),
        "--settings 'megatron:expert_fc1+core': 'core' is no module of Megatron-Core's engine. Give some of: layer_input",
    ),
    ((ARGUMENTS, "--settings", "plan:none.json"), "none.json: No such file or directory."),
    ((ARGUMENTS, "--plans", "none.json"), "none.json: No such file or directory."),
    ((ARGUMENTS, "--budgets", "18.9PB"), "--budgets '18.9PB' is not a size."),
    ((ARGUMENTS, "--budgets", "5"), "--budgets '5' has no unit. Add one of B, KiB, MiB, GiB, TiB, as in 5GiB."),
    ((ARGUMENTS, "--settings", "budget:5"), "--settings budget:5: '5' has no unit."),
    ((ARGUMENTS, "--search-megatron"), "--search-megatron looks for what is fastest at each budget. Give --budgets"),
    ((ARGUMENTS, "--search-limit", "9"), "--search-limit 9 is for a search. Give --search-megatron too."),
    ((ARGUMENTS, "--search-megatron", "--budgets", "1GiB", "--check-bits"), "--check-bits and --search-megatron exclude"),
    ((ARGUMENTS, "--search-megatron", "--budgets", "1GiB", "--search-limit", "0"), "--search-limit 0 is below 1."),
    ((ARGUMENTS, "--profile", "none.json", "--check-bits"), "--check-bits and --profile exclude each other"),
    ((ARGUMENTS, "--nothing-every", "1", "--check-bits"), "--check-bits and --nothing-every exclude each other"),
    ((ARGUMENTS, "--nothing-every", "0"), "--nothing-every 0 is below 1. Give 1 or more."),
    ((ARGUMENTS, "--check-bits", "--trace"), "--check-bits and --trace exclude each other"),
]
REFUSED_AFTER_TORCH = [
    (("--moe-router-topk", "5"), "--moe-router-topk 5 is above --num-experts 4."),
    (("--recompute-granularity", "selective"), "--recompute-granularity is what settings choose here."),
    (("--repeat", "3"), "--repeat is not a flag that this version knows. Did you mean --repeats?"),
    (("--out", "taken"), "--out 'taken' cannot be written to: File exists. Give a folder that you may write to."),
    (("--settings", "plan:a/x.json", "plan:b/x.json"), "two settings are called plan:x."),
    (("--plans", "a/x.json", "b/x.json"), "two settings are called plan:x."),
    (("--profile", "none.json"), "profile none.json: No such file or directory. Give a file"),
    (("--settings", "profile"), "--settings 'profile' is no setting."),
    (
        ("--search-megatron", "--budgets", "1GiB"),
        "Megatron-Core's own offload engine needs a GPU, and there is none. Run it on",
    ),
]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_two_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write_plan(Path(folder, "x.json"), {(0, "layer"): Action.RECOMPUTE, (1, "expert_fc1"): Action.OFFLOAD})


def run_and_refuse(words, capsys):
    """Return the one line that the command ended with, after checking that it did nothing else."""
    before = sorted(Path().iterdir())
    assert main(["bench", *words]) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert len(said.splitlines()) == 1, said
    assert sorted(Path().iterdir()) == before
    return said


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words[1:]) or "none" for words, _ in REFUSED])
def test_bad_input_ends_with_code_2_and_one_line(words, message, capsys):
    assert message in run_and_refuse(words, capsys)


@pytest.mark.parametrize(("words", "message"), REFUSED_AFTER_TORCH, ids=[" ".join(words) for words, _ in REFUSED_AFTER_TORCH])
def test_a_training_that_cannot_be_ends_with_code_2_and_one_line(words, message, capsys):
    assert message in run_and_refuse((ARGUMENTS, *words), capsys)


@pytest.mark.parametrize(
    "words", [("plan:a/x.json", "--plans", "other.json"), ("plan:a/x.json", "plan:other.json")], ids=" ".join
)
def test_all_plan_files_are_compared_with_the_training_before_anything_is_measured(words, capsys):
    Path("other.json").write_text(OffloadPlan(actions={}, made_for={"num_layers": 5}).to_json(), encoding="utf-8")
    said = run_and_refuse((ARGUMENTS, "--steps", "1", "--warmup", "1", "--settings", *words), capsys)
    assert "--offload-plan other.json: The plan was made for num_layers 5, and this training has 4. Plan for this" in said


def test_it_is_not_started_by_torchrun(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    message = "WORLD_SIZE is 2, and bench starts the processes of a training itself. Leave torchrun out."
    assert message in run_and_refuse((ARGUMENTS,), capsys)


def read_rows(folder):
    with Path(folder, "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.timeout(300)  # three processes, each of which loads torch and Megatron-Core
def test_settings_are_measured_side_by_side(capsys):
    words = ["--settings", "recompute:full", "ours:expert_fc1", "megatron:core_attn", "te-layers:1", "budget:12MiB"]
    words += [
        "--plans",
        "a/x.json",
        "--budgets",
        "60MiB",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--repeats",
        "2",
        "--trace",
        "--profile",
    ]
    assert main(["bench", ARGUMENTS, *words, "--out", "results/tiny"]) == 0
    shown, _ = capsys.readouterr()
    rows = read_rows("results/tiny")
    names = [(row["setting"], row["process"], row["repeat"]) for row in rows]
    main_names = ["nothing", "recompute:full", "ours:expert_fc1", "budget:12.00MiB", "plan:x", "budget:60.00MiB"]
    assert names == [
        *((name, "main", "0") for name in ("nothing", "profile", *main_names[1:])),
        *((name, "main", "1") for name in main_names),
        *((name, "megatron", repeat) for repeat in "01" for name in ("nothing", "megatron:core_attn")),
        *((name, "te-layers", repeat) for repeat in "01" for name in ("nothing", "te-layers:1")),
    ]
    failures = {row["setting"]: row["failure"] for row in rows if row["failure"]}
    assert set(failures) == {"megatron:core_attn", "te-layers:1", "budget:12.00MiB"}
    assert failures["megatron:core_attn"] == "Megatron-Core's own offload engine needs a GPU, and there is none. Run it on one."
    assert "CPU Offloading is enabled when TE is not present" in failures["te-layers:1"]
    # From the profile: the hardware table does not have this device.
    assert "A memory budget of 11.98 MiB is not above the static memory" in failures["budget:12.00MiB"]
    peaks = {row["setting"]: int(row["activation_peak_bytes"] or 0) for row in rows}
    assert 0 < peaks["recompute:full"] < peaks["plan:x"] < peaks["ours:expert_fc1"] < peaks["nothing"]
    assert "recompute:full" in shown
    assert "60.00 MiB" in shown
    predicted = {row["setting"] for row in rows if row["profile_step_s"]}
    assert predicted == {"nothing", "recompute:full", "ours:expert_fc1", "plan:x", "budget:60.00MiB"}
    assert "predicted from the profile, worst first" in shown
    assert "## Predicted from the profile" in Path("results/tiny/predictions.md").read_text(encoding="utf-8")
    document = json.loads(Path("results/tiny/run.json").read_text(encoding="utf-8"))
    assert document["surroundings"]["device"] == "CPU"
    assert document["plans"]["x"]["sites"]
    assert len(document["runs"]) == len(rows)
    # `nothing` of each kind of process.
    assert sorted(row["setting"] for row in document["predictions"]) == sorted([*predicted, "nothing", "nothing"])
    found = {path.name for path in Path("results/tiny").iterdir()}
    assert "this device is no GPU" in Path("results/tiny/traces.md").read_text(encoding="utf-8")
    traces = {f"trace_{name}.json.gz" for name in ("nothing", "recompute_full", "ours_expert_fc1", "plan_x")}
    assert found >= traces | {
        "frontier.png",
        "results.md",
        "run.json",
        "results.csv",
        "traces.md",
        "profile.json",
        "log_main_0.txt",
        "log_te-layers_2.txt",
    }


@pytest.mark.timeout(300)
def test_bits_are_compared_and_the_pipeline_has_its_processes_started(capsys):
    words = ["--check-bits", "--settings", "recompute:full", "ours:core_attn+attn_proj", "--pipeline-model-parallel-size", "2"]
    assert main(["bench", ARGUMENTS, *words]) == 0
    shown, _ = capsys.readouterr()
    assert "4 layers on 2 x CPU" in " ".join(shown.split())  # wrapped where the path is long
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert cells == [
        ["nothing, again", "yes", ""],
        ["recompute:full", "yes", ""],
        ["ours:core_attn+attn_proj", "yes", ""],
    ]


@pytest.mark.timeout(300)
def test_each_process_of_a_pipeline_writes_a_trace(capsys):
    words = ["--trace", "--settings", "nothing", "--steps", "1", "--warmup", "1", "--pipeline-model-parallel-size", "2"]
    assert main(["bench", ARGUMENTS, *words, "--out", "traced"]) == 0
    traces = [Path("traced") / name for name in ("trace_nothing.json.gz", "trace_nothing_rank1.json.gz")]
    # The first stage has the embedding, and the last the loss.
    ops = [{event["name"] for event in read_events(path)} for path in traces]
    assert ["aten::embedding" in names for names in ops] == [True, False]
    assert ["_VocabParallelCrossEntropy" in names for names in ops] == [False, True]
    assert {path.name for path in Path("traced").glob("trace_*")} == {path.name for path in traces}


def answer(monkeypatch, make_outcome):
    """Let every run have the outcome that `make_outcome` gives for its number, without a process."""

    def run_sessions(job, runs, *, first_session, on_message, **options):
        found = Surroundings(device="CPU", driver=None, python="3", packages={}, cuda=None, cpus=1, variables={})
        on_message(Ready(found))
        for number, run in enumerate(runs):
            yield Outcome(setting=run.setting, repeat=run.repeat, session=first_session, **make_outcome(number))

    monkeypatch.setattr(results, "run_sessions", run_sessions)


def test_bits_that_differ_end_with_code_1(capsys, monkeypatch):
    def make_outcome(number):
        digest = "other" if number == 2 else "same"
        return {"bits": (StepRecord(losses=(1.0,), gradient_digests={"0.weight": digest}, seconds=1.0),)}

    answer(monkeypatch, make_outcome)
    assert main(["bench", ARGUMENTS, "--check-bits", "--settings", "recompute:full", "save_on_cpu", "--out", "bits"]) == 1
    assert "gradients from step 1, 0.weight" in capsys.readouterr().out
    runs = json.loads(Path("bits/run.json").read_text(encoding="utf-8"))["runs"]
    digests = [run["bits"] for run in runs]
    assert [digest == digests[0] for digest in digests] == [True, True, False, True]
    page = Path("bits/bits.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[:2] for line in page[4:7]] == [
        ["| nothing, again", "yes"],
        ["| recompute:full", "no"],
        ["| save_on_cpu", "yes"],
    ]


def test_bits_that_were_not_compared_end_with_code_1(capsys, monkeypatch):
    bits = (StepRecord(losses=(1.0,), gradient_digests={"0.weight": "same"}, seconds=1.0),)
    answer(monkeypatch, lambda number: {"failure": "refused"} if number == 2 else {"bits": bits})
    assert main(["bench", ARGUMENTS, "--check-bits", "--settings", "recompute:full", "save_on_cpu", "--out", "bits"]) == 1
    assert "| recompute:full | not run | refused |" in Path("bits/bits.md").read_text(encoding="utf-8")


def test_what_a_search_finds_is_measured_with_all_others(capsys, monkeypatch):
    asked = []

    def try_out(job, runs, *, first_session, **options):
        for run in runs:
            asked.append(run.setting.name)
            size = len(run.setting.modules) + 2 * (run.setting.system is System.RECOMPUTE)
            measurement = Measurement(step_seconds=(1 + size / 50,), activation_peak_bytes=20 * 2**20 - size * 2**20)
            yield Outcome(setting=run.setting, repeat=0, session=first_session, measurement=measurement)

    monkeypatch.setattr(search_runs, "run_sessions", try_out)
    monkeypatch.setattr(megatron_engine, "check_machine", lambda: None)
    answer(monkeypatch, lambda number: {"measurement": Measurement(step_seconds=(1.0,), activation_peak_bytes=17 * 2**20)})
    words = ["--search-megatron", "--budgets", "18MiB", "17MiB", "--search-limit", "20", "--settings", "recompute:full"]
    assert main(["bench", ARGUMENTS, *words, "--out", "found"]) == 0
    tried = len(asked) - asked.count("nothing")
    rows = {row["setting"]: row["process"] for row in read_rows("found")}
    document = json.loads(Path("found/run.json").read_text(encoding="utf-8"))
    assert document["search"]["tried"] == tried <= 20
    winners = {name for names in document["search"]["fastest"].values() for name in names}
    assert winners <= set(rows)
    assert {rows[name] for name in winners if name.startswith("megatron")} == {"megatron"}
    shown = capsys.readouterr().out
    assert f"{tried} settings of {document['search']['possible']} tried" in " ".join(shown.split())
    assert Path("found/search.md").read_text(encoding="utf-8").startswith(f"{tried} settings of")


def test_where_nothing_fails_it_ends_with_code_2_and_says_where_the_output_is(capsys, monkeypatch):
    answer(monkeypatch, lambda number: {"failure": "out of memory"})
    assert main(["bench", ARGUMENTS, "--settings", "recompute:full", "--out", "broken"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [f"fgoffload: error: {ARGUMENTS}: out of memory. The output of the training is in broken."]


def test_a_setting_that_fails_leaves_the_exit_code_at_0(capsys, monkeypatch):
    measurement = Measurement(step_seconds=(1.0,))
    answer(monkeypatch, lambda number: {"failure": "refused"} if number == 1 else {"measurement": measurement})
    assert main(["bench", ARGUMENTS, "--settings", "recompute:full", "save_on_cpu"]) == 0
    assert "recompute:full: refused" in capsys.readouterr().out


def test_where_all_settings_fail_it_ends_with_code_1(capsys, monkeypatch):
    measurement = Measurement(step_seconds=(1.0,))
    answer(monkeypatch, lambda number: {"failure": "refused"} if number else {"measurement": measurement})
    assert main(["bench", ARGUMENTS, "--settings", "recompute:full", "save_on_cpu"]) == 1
    assert "save_on_cpu: refused" in capsys.readouterr().out
    assert main(["bench", ARGUMENTS, "--settings", "nothing"]) == 0


def test_without_matplotlib_the_tables_are_shown_and_a_line_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    answer(monkeypatch, lambda number: {"measurement": Measurement(step_seconds=(1.0,))})
    assert main(["bench", ARGUMENTS, "--settings", "recompute:full", "--out", "found"]) == 0
    shown, said = capsys.readouterr()
    assert "recompute:full" in shown
    assert "fgoffload: warning: there is no frontier.png: import of matplotlib.figure halted" in said
    assert not Path("found/frontier.png").exists()


def test_intervals_without_scipy_are_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--repeats 3 shows intervals, for which scipy is missing." in run_and_refuse((ARGUMENTS, "--repeats", "3"), capsys)


def list_children(pid):
    shown = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in shown.split()]


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="asks for child processes")
def test_ctrl_c_ends_it_and_its_processes_soon(tmp_path):
    command = [sys.executable, "-m", "fgoffload", "bench", ARGUMENTS, "--settings", "recompute:full", "--steps", "500"]
    # A session of its own: the signal goes to one process here, as it goes to all of them from a terminal.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for line in process.stderr:
        if line.startswith("training nothing"):
            break
    children = list_children(process.pid)
    assert children
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.splitlines() == ["fgoffload: interrupted"]
    deadline = begin + 20
    while any(os.path.exists(f"/proc/{child}") for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [child for child in children if os.path.exists(f"/proc/{child}")] == []
