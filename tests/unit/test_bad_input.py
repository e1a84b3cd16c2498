"""Tests that invalid input causes one error and exit code 2."""

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
from fgoffload.errors import MAX_MESSAGE_LENGTH, ConfigError
from fgoffload.text_files import read_text_file


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_rejected(capsys, *words):
    """Run a command that must exit with code 2 and print only one error line, and return this line."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    return line


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("trian",), "train"),
        (("--verson",), "--version"),
        (("train", "--stesp", "3"), "--steps"),
        (("profile", "--jsn=x"), "--json"),
        (("bench", "--chek-bits"), "--check-bits"),
        (("run", "--hepl"), "--help"),
    ],
)
def test_a_misspelled_word_gets_a_suggestion(capsys, words, suggestion):
    assert f"Did you mean {suggestion}?" in run_rejected(capsys, *words)


def test_a_file_with_a_similar_name_is_suggested(capsys):
    Path("train_moe.sh").touch()
    assert "Did you mean train_moe.sh?" in run_rejected(capsys, "plan", "train_mo.sh", "--gpu", "h100")


def test_a_plan_file_is_not_taken_for_a_model(capsys):
    Path("plan.json").write_text('{"format": 1, "sites": []}', encoding="utf-8")
    assert "plan.json is a plan, not a model." in run_rejected(capsys, "plan", "plan.json", "--gpu", "h100")


def test_help_of_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(("help", "help"))
    assert "run an unmodified training script" in capsys.readouterr().out


def test_megatrons_optimizer_flag_is_not_an_abbreviation_of_our_flags(capsys):
    message = "error: --optimizer expected one argument."
    assert message in run_rejected(capsys, "plan", ARGUMENTS, "--gpu", "h100", "--optimizer")


def test_long_errors_are_truncated_in_the_middle():
    message = str(ConfigError(f"--tags {' '.join(map(str, range(100_000)))} are too many. Give fewer."))
    assert len(message) <= MAX_MESSAGE_LENGTH
    assert message.startswith("--tags 0 1 2 ")
    assert message.endswith(" 99999 are too many. Give fewer.")


@pytest.mark.parametrize("modules", ["core_attn", 7, (7,)])
def test_offload_modules_must_be_a_sequence_of_names(modules):
    with pytest.raises(ConfigError, match=r"is not a sequence of tags\. Pass a sequence, for example \('core_attn',\)"):
        OffloadConfig(offload_modules=modules)


@pytest.mark.parametrize("value", ["abc", "-1"])
def test_an_invalid_launcher_variable_is_rejected_before_training(capsys, monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert f"LOCAL_WORLD_SIZE='{value}' is not a number" in run_rejected(capsys, "train", ARGUMENTS, "--steps", "1")


def test_a_budget_below_static_memory_is_rejected_before_the_first_step(capsys, monkeypatch):
    monkeypatch.setattr("fgoffload.cli.measurement.Trainer.run_step", lambda trainer: pytest.fail("a step ran"))
    assert main(("train", ARGUMENTS, "--offload-modules", "auto", "--offload-memory-budget", "100KiB")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--offload-memory-budget 100.00 KiB is not above the static memory of a rank" in line


@pytest.mark.parametrize(
    ("option", "value"), [("--nproc-per-node", "0"), ("--nproc-per-node", "abc"), ("--nnodes", "0"), ("--x", "0")]
)
def test_invalid_torchrun_options_cause_one_error(option, value):
    with pytest.raises(ConfigError, match=r"^torchrun rejects its options: .*(0|abc|--x).*\. See `torchrun --help`\.$"):
        run_torchrun([option, value, "x.py"])


@pytest.mark.parametrize("content", [b"def f(:\n", b"\0\1", b"\xff\xfe"], ids=["syntax", "zeros", "encoding"])
def test_a_script_that_is_not_python_source_is_rejected(capsys, content):
    Path("x.py").write_bytes(content)
    assert "script 'x.py' is not Python source: " in run_rejected(capsys, "run", "x.py")


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
def test_too_large_and_endless_files_are_rejected(monkeypatch, name, make, message):
    monkeypatch.setattr(text_files, "MAX_TEXT_BYTES", 100)
    make(Path(name))
    with pytest.raises(ConfigError) as caught:
        read_text_file(Path(name), name="profile", fix="Measure again.")
    assert str(caught.value) == message


def start(*words, **options):
    # Buffered output, as for users.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment, **options)


@pytest.mark.parametrize("words", [("--help",), ("plan", "--help")])
def test_a_full_disk_behind_stdout_causes_one_error(words):
    with open("/dev/full", "wb") as full:
        ended = start("-m", "fgoffload", *words, stdout=full)
    message = (
        "fgoffload: error: the output cannot be written: No space left on device. Free disk space or redirect it elsewhere.\n"
    )
    assert (ended.returncode, ended.stderr) == (2, message)
