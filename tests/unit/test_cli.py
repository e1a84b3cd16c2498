"""Tests `fgoffload train`, and the options and messages that all commands share."""

import importlib.metadata
import json
import logging
import subprocess
from pathlib import Path

import pytest
from support.command import ARGUMENTS, OFF, assert_messages

import fgoffload
from fgoffload.cli import main
from fgoffload.cli.streams import LibraryLog

BEFORE_TORCH = [
    ((), "COMMAND is missing. Use one of: train, run, plan, profile, bench, doctor, completion. For example: "),
    (("train",), "ARGUMENTS.sh is missing. Pass a Megatron argument file first"),
    (("trian",), "COMMAND 'trian' is not one of: train, run, plan, profile, bench, doctor, completion. Did you mean train?"),
    (("train", "none.sh"), "argument file 'none.sh' does not exist. Pass a file"),
    (("train", ARGUMENTS, "--steps", "0"), "--steps 0 is below 1. Use 1 or more"),
    (("train", ARGUMENTS, "--steps"), "--steps expected one argument. Use --steps N."),
    (("train", ARGUMENTS, "--plot", "x.txt"), "--plot 'x.txt' has an unsupported image format. Use one of .png"),
    (("train", ARGUMENTS, "--plot", "folder.png"), "--plot 'folder.png' cannot be written: Is a directory."),
]

SITE = {"chunk": 0, "layer": 0, "tag": "core_attn", "action": "offload"}

AFTER_TORCH = [
    (("--moe-router-topk", "5"), "--moe-router-topk 5 is above --num-experts 4. Use --moe-router-topk 4 or less"),
    (
        ("--group-query-attention", "--num-query-groups", "3"),
        f"{ARGUMENTS} and the command line: --num-query-groups 3 does not divide --num-attention-heads 8.",
    ),
    (("--offload-plan", "none.json"), "--offload-plan none.json: No such file or directory."),
    (("--step", "3"), "fgoffload: error: --step is an unknown flag. Did you mean --steps?"),
    (("--pipeline-model-parallel-size", "2"), "one copy of the model needs 2 processes (tensor x pipeline x context parallel"),
    (("--pipeline-model-parallel-size", "16"), "or plan without GPUs with fgoffload plan"),
    (("--offload-modules", "core_atn"), "--offload-modules 'core_atn' is not a tag. Did you mean 'core_attn'?"),
    (("--data", "none.txt"), "--data none.txt does not exist. Use a text file"),
]


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_rejected(arguments, capsys):
    """Run a command that must exit with code 2 and write no files, and return its only line of output."""
    before = sorted(Path().iterdir())
    code = main(arguments)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fgoffload: error: ")
    assert sorted(Path().iterdir()) == before
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"), BEFORE_TORCH, ids=[" ".join(case[0][1:])[-80:] or "none" for case in BEFORE_TORCH]
)
def test_bad_input_exits_with_code_2_and_one_line(arguments, message, capsys):
    Path("folder.png").mkdir()
    assert message in run_rejected(arguments, capsys)


@pytest.mark.parametrize(("flags", "message"), AFTER_TORCH, ids=[" ".join(case[0]) for case in AFTER_TORCH])
def test_bad_flags_and_texts_exit_with_code_2_and_one_line(flags, message, capsys):
    Path("empty.txt").touch()
    Path("short.txt").write_text("abc", encoding="utf-8")
    assert message in run_rejected(("train", ARGUMENTS, *flags), capsys)


def test_train_compares_with_the_baseline_and_plots_memory(capsys):
    assert main(["train", ARGUMENTS, "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert_messages(err, "training without offload: 3 steps", "training with offload: 3 steps")
    for row in ("losses bitwise identical", "gradients bitwise identical"):
        assert [line.split("│")[3].strip() for line in out.splitlines() if row in line] == ["yes"]
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")


def test_training_without_offload_flags_runs_once(capsys):
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1", "--plot", "off.svg"]) == 0
    out = capsys.readouterr().out
    assert "Trained once, since offload is off." in out
    assert "with offload" not in out.replace("without offload", "")
    assert Path("off.svg").is_file()


def test_a_gradient_difference_exits_with_code_1_and_names_the_parameter(capsys, monkeypatch):
    from fgoffload.trainer.trainer import Trainer

    run_step = Trainer.run_step

    def run_and_change_a_digest(trainer):
        results.append(run_step(trainer))
        if len(results) == 4:  # the second step of the second training
            results[-1].gradient_digests[next(iter(results[-1].gradient_digests))] = "changed"
        return results[-1]

    results = []
    monkeypatch.setattr(Trainer, "run_step", run_and_change_a_digest)
    assert main(["train", ARGUMENTS, "--steps", "2"]) == 1
    first = next(iter(results[0].gradient_digests))
    assert f"The gradients differ, first in step 2: {first}." in capsys.readouterr().out


def test_a_megatron_error_in_the_first_step_is_one_line_with_a_traceback_hint(capsys, monkeypatch):
    def fail(self, *args, **kwargs):
        raise IndexError("index 7 is out of range")

    monkeypatch.setattr("fgoffload.cli.measurement.Trainer.run_step", fail)
    assert main(["train", ARGUMENTS, "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert f"{ARGUMENTS}: Megatron-Core rejected these arguments in the first step: IndexError: index 7 is out of range." in err
    assert "Set FGOFFLOAD_TRACEBACK=1 to see the traceback." in err
    assert "Traceback" not in err

    monkeypatch.setenv("FGOFFLOAD_TRACEBACK", "1")
    assert main(["train", ARGUMENTS, "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "in fail" in err  # the original is chained


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"made_for": {"num_layers": 5}}, "plan.json: The plan was made for num_layers 5, but this training run has 4."),
        ({"made_for": {"tokens": 8}}, "The plan was made for tokens 8, but this training run has 256."),
        ({"sites": [SITE | {"layer": 4}]}, "contains layers.4.core_attn in chunk 0, but the model has 4 layers and 1 chunk(s)"),
        ({"sites": [SITE | {"tag": "core_atn"}]}, "--offload-plan plan.json 'core_atn' is not a tag"),
    ],
)
def test_a_plan_for_another_training_run_is_rejected_before_training(capsys, document, message):
    Path("plan.json").write_text(json.dumps({"format": 1, "sites": [], **document}), encoding="utf-8")
    assert message in run_rejected(("train", ARGUMENTS, "--offload-plan", "plan.json"), capsys)


def test_info_messages_are_shown_only_for_auto_plans(capsys):
    with LibraryLog().attached():
        logging.getLogger("fgoffload.integrations.megatron.auto.auto_offload").info("2 of 9 sites are offloaded")
        logging.getLogger("fgoffload.integrations.megatron.adapter.site_actions").info("chunk 0")
        logging.getLogger("fgoffload.engine.engine").warning("late")
    assert capsys.readouterr().err.splitlines() == ["fgoffload: 2 of 9 sites are offloaded", "fgoffload: warning: late"]


def test_only_the_first_process_shows_warnings(capsys):
    log = LibraryLog()
    log.setLevel(logging.CRITICAL)
    with log.attached():
        logging.getLogger("fgoffload.engine.engine").warning("late")
    assert capsys.readouterr().err == ""


def test_version_lists_the_versions_of_dependencies(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert (caught.value.code, lines[0]) == (0, f"fgoffload {fgoffload.__version__}")
    assert f"torch {importlib.metadata.version('torch')}" in lines


def test_help_command_and_help_flag_print_the_same(capsys):
    for words in (["help", "plan"], ["plan", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
    out = capsys.readouterr().out
    assert out == 2 * out[: len(out) // 2]
    assert "--offload-memory-budget SIZE" in out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "offload for Megatron, Hugging Face and PyTorch." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        (("fgoffload", "p"), {"plan", "profile"}),
        (("fgoffload", "plan", "--offload-m"), {"--offload-memory-budget"}),
        (("fgoffload", "train", "tiny"), {"tiny_dense", "tiny_moe", "tiny_text.txt"}),
    ],
)
def test_bash_completes_commands_flags_models_and_files(typed, completions, capsys):
    Path("tiny_text.txt").touch()
    assert main(["completion", "bash"]) == 0
    script = f"{capsys.readouterr().out}COMP_WORDS=({' '.join(typed)}) COMP_CWORD={len(typed) - 1}; _fgoffload; "
    script += "echo ${COMPREPLY[@]}"
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) == completions
