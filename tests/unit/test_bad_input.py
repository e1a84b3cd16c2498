"""Tests that invalid input ends in one error with exit code 2."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import ARGUMENTS

from fgoffload import OffloadConfig, text_files
from fgoffload.cli import main
from fgoffload.cli.run import run_torchrun
from fgoffload.errors import LONGEST_MESSAGE, ConfigError
from fgoffload.text_files import read_text_file


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refuse(capsys, *words):
    """Return the one line that a command ends with."""
    assert main(words) == 2
    shown, said = capsys.readouterr()
    (line,) = said.splitlines()
    assert shown == ""
    return line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("trian",), "train"),
        (("--verson",), "--version"),
        (("train", "--stesp", "3"), "--steps"),
        (("profile", "--jsn=x"), "--json"),
        (("bench", "--chek-bits"), "--check-bits"),
        (("run", "--hepl"), "--help"),
    ],
)
def test_a_word_that_is_typed_wrongly_gets_a_suggestion(capsys, words, meant):
    assert f"Did you mean {meant}?" in refuse(capsys, *words)


def test_a_file_with_a_similar_name_is_suggested(capsys):
    Path("train_moe.sh").touch()
    assert "Did you mean train_moe.sh?" in refuse(capsys, "plan", "train_mo.sh", "--gpu", "h100")


def test_a_plan_file_is_not_taken_for_a_model(capsys):
    Path("plan.json").write_text('{"format": 1, "sites": []}', encoding="utf-8")
    assert "plan.json is a plan, not a model." in refuse(capsys, "plan", "plan.json", "--gpu", "h100")


def test_help_of_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(("help", "help"))
    assert "run an unmodified training script" in capsys.readouterr().out


def test_megatrons_own_optimizer_flag_is_not_taken_for_one_of_ours(capsys):
    message = "the command line: --optimizer expected one argument."
    assert message in refuse(capsys, "plan", ARGUMENTS, "--gpu", "h100", "--optimizer")


def test_an_error_of_many_values_is_cut_in_the_middle():
    message = str(ConfigError(f"--tags {' '.join(map(str, range(100_000)))} are too many. Give fewer."))
    assert len(message) <= LONGEST_MESSAGE
    assert message.startswith("--tags 0 1 2 ")
    assert message.endswith(" 99999 are too many. Give fewer.")


@pytest.mark.parametrize("modules", ["core_attn", 7, (7,)])
def test_tags_that_are_no_sequence_of_names_are_refused(modules):
    with pytest.raises(ConfigError, match=r"is not a sequence of tags\. Pass one, for example \('core_attn',\)"):
        OffloadConfig(offload_modules=modules)


@pytest.mark.parametrize("value", ["abc", "-1"])
def test_a_variable_of_a_launcher_that_is_no_number_is_found_before_the_first_training(capsys, monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert f"LOCAL_WORLD_SIZE='{value}' is not a number" in refuse(capsys, "train", ARGUMENTS, "--steps", "1")


def test_a_budget_below_the_static_memory_is_found_before_the_first_step(capsys, monkeypatch):
    monkeypatch.setattr("fgoffload.cli.measurement.Trainer.run_step", lambda trainer: pytest.fail("a step ran"))
    assert main(("train", ARGUMENTS, "--offload-modules", "auto", "--offload-memory-budget", "100KiB")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--offload-memory-budget 100.00 KiB is not above the static memory of a rank" in line


@pytest.mark.parametrize(
    ("option", "value"), [("--nproc-per-node", "0"), ("--nproc-per-node", "abc"), ("--nnodes", "0"), ("--x", "0")]
)
def test_arguments_that_torchrun_cannot_use_cause_one_error(option, value):
    with pytest.raises(ConfigError, match=r"^torchrun rejects its options: .*(0|abc|--x).*\. See `torchrun --help`\.$"):
        run_torchrun([option, value, "x.py"])


@pytest.mark.parametrize("content", [b"def f(:\n", b"\0\1", b"\xff\xfe"], ids=["syntax", "zeros", "encoding"])
def test_a_script_that_is_no_python_source_is_refused_before_it_runs(capsys, content):
    Path("x.py").write_bytes(content)
    assert "script 'x.py' is not Python source: " in refuse(capsys, "run", "x.py")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("large.json", lambda path: path.write_bytes(bytes(101)), "profile: larger than 100 B. Measure again."),
        (
            "bomb.json.gz",
            lambda path: path.write_bytes(gzip.compress(bytes(101))),
            "profile: larger than 100 B after decompression. Measure again.",
        ),
        ("/dev/zero", lambda path: None, "profile: larger than 100 B. Measure again."),
    ],
)
def test_a_file_that_has_no_end_or_is_too_large_is_refused(monkeypatch, name, make, message):
    monkeypatch.setattr(text_files, "LARGEST_TEXT_BYTES", 100)
    make(Path(name))
    with pytest.raises(ConfigError) as caught:
        read_text_file(Path(name), name="profile", fix="Measure again.")
    assert str(caught.value) == message


def start(*words, **options):
    # Buffered, as for users.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment, **options)


@pytest.mark.parametrize("words", [("--help",), ("plan", "--help")])
def test_output_that_there_is_no_room_for_is_one_error(words):
    with open("/dev/full", "wb") as full:
        ended = start("-m", "fgoffload", *words, stdout=full)
    said = (
        "fgoffload: error: the output cannot be written: No space left on device. Free disk space or redirect it elsewhere.\n"
    )
    assert (ended.returncode, ended.stderr) == (2, said)
