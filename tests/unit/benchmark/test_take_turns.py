"""examples/benchmarks/take_turns.py: settings in processes of their own, step by step in turn, on the CPU."""

import contextlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import types
from pathlib import Path

import pytest
from support.scripts import BENCHMARKS, load_script

from fgoffload.benchmark.report import Workload
from fgoffload.benchmark.settings import NOTHING, ProcessKind, parse_setting
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.environment import keep_environment, set_environment

ROOT = Path(__file__).parents[3]
MODEL = (ROOT / "arguments" / "tiny_moe.sh", "--num-layers", "1")
OURS, MEGATRON = parse_setting("ours:expert_fc1"), parse_setting("megatron:expert_fc1")


@pytest.fixture(scope="module")
def script():
    with load_script("take_turns") as module:
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else the script's own would stay
    # A process that is spawned finds the functions of this one by the name of their module.
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["take_turns.py", *map(str, words)])
    return script.main()


def test_each_setting_has_nothing_of_its_own_kind_of_process_beside_it(script):
    players = script.list_players([OURS, MEGATRON, parse_setting("recompute:full")])
    assert [(player.setting, player.kind) for player in players] == [
        (NOTHING, ProcessKind.MAIN),
        (OURS, ProcessKind.MAIN),
        (NOTHING, ProcessKind.MEGATRON),
        (MEGATRON, ProcessKind.MEGATRON),
        (parse_setting("recompute:full"), ProcessKind.MAIN),
    ]


def test_a_process_has_the_variables_of_its_kind_and_this_one_has_them_no_longer(monkeypatch):
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "5")
    for kind, value in ((ProcessKind.MEGATRON, "1"), (ProcessKind.MAIN, None)):
        with keep_environment(kind.environment):
            set_environment(kind.environment)
            assert os.environ.get("NVTE_CPU_OFFLOAD_V1") == value
        assert os.environ["NVTE_CPU_OFFLOAD_V1"] == "5"


def test_each_process_starts_with_the_variables_of_its_kind_and_is_ended(script, monkeypatch, tmp_path):
    happened = []

    class Started:
        def __init__(self, *, target, args, daemon):
            self.name = args[1].name

        def start(self):
            happened.append((self.name, os.environ.get("NVTE_CPU_OFFLOAD_V1")))

        def kill(self):
            happened.append((self.name, "killed"))

        def join(self):
            pass

    context = types.SimpleNamespace(Process=Started, Pipe=multiprocessing.Pipe)
    monkeypatch.setattr(script.multiprocessing, "get_context", lambda method: context)
    with script.start(None, script.list_players([OURS, MEGATRON]), tmp_path, repeat=0):
        assert happened == [(NOTHING.name, None), (OURS.name, None), (NOTHING.name, "1"), (MEGATRON.name, "1")]
        assert "NVTE_CPU_OFFLOAD_V1" not in os.environ
        happened.clear()
    assert sorted(happened) == sorted((name, "killed") for name in (NOTHING.name, OURS.name, NOTHING.name, MEGATRON.name))


class Process:
    """Stands in for the pipe to a process: each step takes a second longer than the one before it, whosever that was."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def send(self, word):
        self.asked.append((self.name, word))

    def poll(self, seconds):
        return True

    def recv(self):
        word = self.asked[-1][1]
        return [float(len(self.asked))] * word if isinstance(word, int) else float(len(self.asked))


def test_a_round_is_a_step_of_each_and_every_other_one_goes_backwards(script):
    asked, players = [], script.list_players([OURS, MEGATRON])
    steps, readings = script.take_turns({player: Process(player.name, asked) for player in players}, 3)
    forwards = [player.name for player in players]
    assert [name for name, _ in asked] == [*forwards, *reversed(forwards), *forwards]
    assert {word for _, word in asked} == {1}
    assert not any(readings.values())  # nobody looked
    assert list(steps.values()) == [[1.0, 8.0, 9.0], [2.0, 7.0, 10.0], [3.0, 6.0, 11.0], [4.0, 5.0, 12.0]]


def test_a_round_may_have_several_steps_and_what_is_drawn_is_read_around_them(script):
    asked, players, within = [], script.list_players([OURS]), []

    class Meter:
        @contextlib.contextmanager
        def read(self):
            begin = len(asked)
            reading = energy_meter.Reading(joules=float(len(within)))
            yield reading
            within.append(asked[begin:])

    with energy_meter_of(script) as energy_meter:
        steps, readings = script.take_turns(
            {player: Process(player.name, asked) for player in players}, 2, steps_a_round=3, meter=Meter()
        )
    nothing, ours = players
    assert within == [[(player.name, 3)] for player in (nothing, ours, ours, nothing)]
    assert [len(own) for own in steps.values()] == [6, 6]
    assert [[one.joules for one in own] for own in readings.values()] == [[0.0, 3.0], [1.0, 2.0]]
    assert script.sum_up([readings, readings], [steps, steps])[ours].joules_a_step == pytest.approx(6 / 12)


@contextlib.contextmanager
def energy_meter_of(script):
    """Yield the module that the script reads energy with."""
    yield sys.modules[script.EnergyMeter.__module__]


def test_the_table_of_energy_has_each_over_the_nothing_of_its_own_process(script):
    nothing, ours, megatrons_nothing, megatrons = script.list_players([OURS, MEGATRON])
    joules = {nothing: 400.0, ours: 420.0, megatrons_nothing: 500.0, megatrons: 600.0}
    table = script.build_energy_table({player: script.Energy(own, 1699.4, 686.6, 0.995) for player, own in joules.items()})
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert columns[1:3] == [["400.0", "420.0", "500.0", "600.0"], ["-", "1.050", "-", "1.200"]]
    assert [column[0] for column in columns[3:]] == ["1699", "687", "100%"]


def test_without_the_library_energy_is_refused_before_a_model_is_built(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run(script, monkeypatch, *MODEL, "--settings", "ours:expert_fc1", "--energy") == 2
    assert "pip install nvidia-ml-py" in capsys.readouterr().err


def test_a_ratio_is_of_two_steps_of_one_round_and_a_repeat_has_the_median_of_its_rounds(script):
    nothing, ours, *_ = script.list_players([OURS, MEGATRON])
    # The machine is four times as slow in the second round of each repeat, and half as slow again in the whole of the second.
    repeats = [{nothing: [1.0, 4.0, 1.0], ours: [1.1, 4.8, 1.3]}, {nothing: [1.5, 6.0, 1.5], ours: [3.0, 6.6, 1.8]}]
    summary = script.summarize(ours, repeats)
    assert summary.ratios == pytest.approx((1.2, 1.2))
    assert summary.step_seconds == (1.1, 4.8, 1.3, 3.0, 6.6, 1.8)


def test_from_three_repeats_on_the_table_has_the_geometric_mean_and_its_interval(script):
    nothing, ours = players = script.list_players([OURS])
    repeats = [{nothing: [1.0], ours: [ratio]} for ratio in (1.0, 1.0, 1.0, 1.0, 1.0, 1.3)]
    workload = Workload(arguments_file="x.sh", layers=1, dtype="bfloat16", tokens=1, model_flop=1, world_size=1)
    surroundings = Surroundings(device="CPU", driver=None, python="3", packages={}, cuda=None, cpus=1, variables={})

    def build(count):
        table = script.build_table(repeats[-count:], [dict.fromkeys(players)] * count, workload, surroundings)
        return list(map(str, table.columns[2].cells))[1], str(table.caption)

    over, caption = build(6)
    assert over == f"{1.3 ** (1 / 6):.3f} [0.934 1.169]" == "1.045 [0.934 1.169]"
    assert caption.endswith(script.INTERVALS)
    assert build(2) == ("1.150", "")


def test_the_table_and_the_file_have_what_each_process_measured(script, tmp_path, monkeypatch, capsys):
    words = ("--settings", "ours:expert_fc1", "--rounds", "3", "--warmup", "1", "--repeats", "1", "--out", tmp_path)
    assert run(script, monkeypatch, *MODEL, *words) == 0
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "turns.json").read_text())
    (repeat,) = document["repeats"]
    assert document["peak_allocated_bytes"] == [dict.fromkeys(repeat)]  # no allocator counts on a CPU
    assert list(repeat) == ["nothing", "ours:expert_fc1"]
    assert all(len(steps) == 3 and min(steps) > 0 for steps in repeat.values())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == list(repeat)
    for name, step, over, by_repeat, peak in rows:
        middle = float(re.match(r"[\d.]+", step).group())
        assert middle == pytest.approx(1e3 * statistics.median(repeat[name]), abs=0.051)
        assert peak == "-"
        ratio = statistics.median(own / other for own, other in zip(repeat[name], repeat["nothing"], strict=True))
        assert (over, by_repeat) == (("-", "-") if name == "nothing" else (f"{ratio:.3f}", f"{ratio:.3f}"))
    assert sorted(path.name for path in tmp_path.glob("log_*")) == ["log_nothing_0.txt", "log_ours_expert_fc1_0.txt"]


def test_a_peak_is_asked_for_when_the_steps_are_over_and_the_table_has_that_of_the_worst_repeat(script):
    asked, players = [], script.list_players([OURS])
    peaks = script.ask_peaks({player: Process(player.name, asked) for player in players})
    assert asked == [(player.name, script.PEAK) for player in players]
    assert list(peaks) == players
    nothing, ours = players
    repeats = [{nothing: 3, ours: 1}, {nothing: None, ours: 2}]
    assert [script.find_worst(player, repeats) for player in players] == [3, 2]
    assert script.find_worst(ours, [{ours: None}]) is None


def test_what_cannot_be_trained_is_said_in_one_line(script, monkeypatch, capsys):
    assert run(script, monkeypatch, *MODEL, "--settings", "megatron:expert_fc1", "--rounds", "1", "--repeats", "1") == 2
    error = capsys.readouterr().err
    assert "needs a GPU" in error
    assert error.count("\n") == 1
    assert run(script, monkeypatch, *MODEL, "--settings", "no_such_thing") == 2
    assert "no_such_thing" in capsys.readouterr().err


def test_a_budget_which_nobody_plans_for_here_is_refused_before_a_process_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "start", None)  # processes start with it
    assert run(script, monkeypatch, *MODEL, "--settings", "ours:expert_fc1", "budget:1MiB") == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert error.startswith("budget:1.00MiB needs a plan, and has none here. Give a plan file")
    assert error.count("\n") == 1
