"""Tests `fgoffload run` on a transformers script without any offload code."""

import json
import logging
import sys
from pathlib import Path

import pytest
from support.commands import run_commands
from support.huggingface import ALL, OLD_NAMES, make_llama, make_trainer, needs

from fgoffload.cli.script import imports_any

pytestmark = [needs("transformers", "accelerate"), OLD_NAMES]

IMPORTS = ("accelerate", "torch._dynamo", "transformers.integrations", "transformers.models.llama.modeling_llama")
"""Most imports of the script, except the module of `Trainer`, which must be imported while the command runs."""
SCRIPT = str(Path(__file__).parents[2] / "support" / "train_llama.py")


def list_output_lines(finished):
    return [line for line in finished.stderr.splitlines() if line.startswith("fgoffload: ")]


def list_logged(caplog):
    return [record.message for record in caplog.records if record.name.startswith("fgoffload.")]


BUDGET = ("--offload-memory-budget", "40MiB")


def test_an_unmodified_script_is_offloaded_and_bitwise_identical():
    command = ("fgoffload", "run", "--", SCRIPT, "--flag", "of the script")
    finished, plain, planned = run_commands(command, (SCRIPT,), (*command, *BUDGET), imports=IMPORTS, without=())
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    saved_gib, percent = (found["log"][-1][f"offload/{name}"] for name in ("saved_gib", "percent"))
    assert list_output_lines(finished) == [
        "fgoffload: Activation offload: OffloadCallback was added to the script's Trainer.",
        f"fgoffload: Memory saved: {saved_gib:.3g} GiB ({percent:.0f}%)",
    ]
    assert found["argv"] == ["--flag", "of the script"]
    assert found["mode"] == "not_parallel"  # no process group in a single process, as without the command
    plain = json.loads(plain.stdout.splitlines()[-1])
    assert [entry["loss"] for entry in found["log"]] == [entry["loss"] for entry in plain["log"]]
    assert all(entry["offload/percent"] > 90 for entry in found["log"])
    assert planned.returncode == 0, planned.stderr
    planned = json.loads(planned.stdout.splitlines()[-1])
    assert planned["argv"] == ["--flag", "of the script"]
    assert [entry["loss"] for entry in planned["log"]] == [entry["loss"] for entry in plain["log"]]


def test_a_script_that_creates_no_trainer_prints_a_warning(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import transformers\n")
    cases = ((), BUDGET, ("--offload-host-budget", "3GiB"))
    finished, budgeted, ignored = run_commands(*(("fgoffload", "run", str(script), *words) for words in cases), imports=IMPORTS)
    line = f"fgoffload: warning: {script} created no Trainer, so nothing was offloaded."
    assert list_output_lines(finished) == [line]
    assert list_output_lines(budgeted) == [f"{line} --offload-memory-budget had no effect."]
    assert "--offload-host-budget has no effect on a Trainer." in ignored.stderr


def test_only_trainers_created_in_the_context_get_the_callback_and_only_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.transformers")
    from fgoffload.integrations.transformers import OffloadCallback
    from fgoffload.integrations.transformers.launch import offload_trainers

    def count(trainer):
        return sum(isinstance(callback, OffloadCallback) for callback in trainer.callback_handler.callbacks)

    before, path = make_trainer(make_llama(), tmp_path), list(sys.meta_path)
    with offload_trainers() as created:
        inside = make_trainer(make_llama(), tmp_path)
        own = make_trainer(make_llama(), tmp_path, OffloadCallback(config=ALL))
        again = make_trainer(make_llama(), tmp_path)
    after = make_trainer(make_llama(), tmp_path)
    assert list(map(count, (before, inside, own, again, after))) == [0, 1, 1, 1, 0]
    assert isinstance(inside.callback_handler.callbacks[0], OffloadCallback)  # before reporters, so that they get its numbers
    assert created == ["Trainer"] * 3
    assert list_logged(caplog) == ["Activation offload: OffloadCallback was added to the script's Trainer."]
    assert sys.meta_path == path


def test_only_the_first_process_logs_the_added_callback(tmp_path, caplog, monkeypatch):
    from transformers import Trainer

    from fgoffload.integrations.transformers.launch import offload_trainers

    caplog.set_level(logging.INFO, logger="fgoffload.integrations.transformers")
    monkeypatch.setattr(Trainer, "is_world_process_zero", lambda trainer: False)
    with offload_trainers() as created:
        make_trainer(make_llama(), tmp_path)
    assert (created, list_logged(caplog)) == (["Trainer"], [])


def test_errors_of_the_budget_are_one_line_and_other_script_errors_keep_their_traceback(tmp_path):
    scripts = [tmp_path / "budget.py", tmp_path / "config.py", tmp_path / "own.py"]
    scripts[0].write_text("from fgoffload import BudgetError\nraise BudgetError('memory 1.00 MiB is too small.', 8)")
    scripts[1].write_text("from fgoffload import ConfigError\nraise ConfigError('memory: no layer could be measured.')")
    scripts[2].write_text("raise ValueError('mine')")
    commands = [("fgoffload", "run", str(script)) for script in (*scripts, scripts[1])]
    commands[1] = (*commands[1], "--offload-memory-budget", "1GiB")
    budget, config, own, without_budget = run_commands(*commands, imports=("torch",))
    assert [one.returncode for one in (budget, config, own, without_budget)] == [2, 2, 1, 1]
    assert "error: memory 1.00 MiB is too small." in budget.stderr
    assert "error: memory: no layer could be measured." in config.stderr
    assert "had no effect" not in config.stderr
    assert ["Traceback" in one.stderr for one in (budget, config, own, without_budget)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, transformers.trainer", True),
        ("def main():\n    from trl import SFTTrainer", True),
        ("from mine.transformers import Trainer", False),
        ("from . import transformers", False),
        ("text = 'import transformers'", False),
        ("no python", False),
    ],
)
def test_imports_any_reads_the_imports_from_the_script_source(source, expected, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert imports_any(str(script), ("transformers", "trl")) is expected


@pytest.mark.slow
def test_two_ddp_processes_are_bitwise_identical():
    logs = []
    for program in (("torch.distributed.run", "--nproc-per-node", "2"), ("fgoffload", "run", "--nproc-per-node", "2", "--")):
        (finished,) = run_commands((*program, SCRIPT))
        assert finished.returncode == 0, finished.stderr
        found = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"argv"')]
        assert [one["mode"] for one in found] == ["distributed"] * 2
        logs.append(found[0]["log"])
    plain, offloaded = logs
    assert [entry["loss"] for entry in plain] == [entry["loss"] for entry in offloaded]
    assert all(entry["offload/percent"] > 90 for entry in offloaded)
