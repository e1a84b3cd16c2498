import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fgoffload
from fgoffload.cli import main

ARGUMENTS = str(Path(__file__).parents[2] / "arguments" / "tiny_moe.sh")
OFF = (
    "#!/usr/bin/env bash\nARGS=(--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1)\n"
)
INTERRUPT_SECONDS = 2.0

BEFORE_TORCH = [
    ((), "the following arguments are required: COMMAND"),
    (("train",), "ARGUMENTS.sh is missing. Give a Megatron argument file first"),
    (("trian",), "invalid choice: 'trian'"),
    (("train", "none.sh"), "argument file 'none.sh' does not exist. Give a file"),
    (("train", "."), "argument file '.' is a folder. Give a file"),
    (("train", ARGUMENTS, "--steps", "x"), "--steps 'x' is not a whole number. Give one from 1, as in 10."),
    (("train", ARGUMENTS, "--steps", "0"), "--steps 0 is below 1. Give 1 or more"),
    (("train", ARGUMENTS, "--steps", "-3"), "--steps -3 is below 1. Give 1 or more"),
    (("train", ARGUMENTS, "--steps"), "argument --steps: expected one argument"),
    (("train", ARGUMENTS, "--plot", "memory.txt"), "--plot 'memory.txt' is no picture's name. End it with one of .png"),
    (("train", ARGUMENTS, "--plot", "none/memory.png"), "--plot 'none/memory.png': folder 'none' does not exist."),
]

AFTER_TORCH = [
    (("--min-offloaded-tensor-size", "many"), "--min-offloaded-tensor-size 'many' is not a whole number."),
    (("--activation-offload-fraction", "1.5"), "--activation-offload-fraction 1.5 is outside 0 to 1."),
    (("--offload-window", "60GB"), "--offload-window '60GB' is not a size."),
    (("--offload-modules", "core_atn"), "--offload-modules 'core_atn' is not a tag. Did you mean 'core_attn'?"),
    (("--offload-modules", "attn_proj"), "--offload-modules 'attn_proj' needs 'core_attn' with it"),
    (("--offload-modules",), "--offload-modules is empty: nothing would leave. Name at least one of: attn_norm"),
    (("--data", "none.txt"), "--data none.txt does not exist. Give a text file"),
    (("--data", "empty.txt"), "--data empty.txt holds no bytes. Give a text file"),
    (("--data", "short.txt"), "--data short.txt has 3 bytes and --seq-length"),
    (("--micro-batch-size", "0"), "--micro-batch-size 0 is below 1. Give 1 or more."),
    (("--num-layer", "4"), "--num-layer is not a flag that this version knows. Did you mean --num-layers?"),
    (("--tensor-model-parallel-size", "2"), "and there are 1. Start a multiple of 2."),
    (("extra",), "'extra' stands where a flag should."),
]


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_and_refuse(arguments, capsys):
    """Return the one line that the command ended with, after checking that it did nothing else."""
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


@pytest.mark.parametrize(("arguments", "message"), BEFORE_TORCH, ids=[" ".join(case[0][1:]) or "none" for case in BEFORE_TORCH])
def test_bad_input_ends_with_code_2_and_one_line(arguments, message, capsys):
    assert message in run_and_refuse(arguments, capsys)


@pytest.mark.parametrize(("flags", "message"), AFTER_TORCH, ids=[" ".join(case[0]) for case in AFTER_TORCH])
def test_a_bad_flag_or_text_ends_with_code_2_and_one_line(flags, message, capsys):
    Path("empty.txt").touch()
    Path("short.txt").write_text("abc", encoding="utf-8")
    assert message in run_and_refuse(("train", ARGUMENTS, *flags), capsys)


def test_an_argument_file_without_flags_ends_with_code_2_and_one_line(capsys):
    Path("none.sh").write_text("# nothing\n", encoding="utf-8")
    assert "none.sh holds no array of flags" in run_and_refuse(("train", "none.sh"), capsys)


def test_an_argument_file_that_would_run_a_command_is_refused_with_its_line(capsys):
    Path("run.sh").write_text("# a model\nARGS=($(touch seen))\n", encoding="utf-8")
    assert "run.sh, line 2: command substitution" in run_and_refuse(("train", "run.sh"), capsys)


def test_an_error_of_several_lines_is_shown_in_one(capsys, monkeypatch):
    def refuse(options, megatron_flags):
        raise fgoffload.StateError("first\n  second")

    monkeypatch.setattr("fgoffload.cli.train.run", refuse)
    assert run_and_refuse(("train", ARGUMENTS), capsys) == "fgoffload: error: first second"


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fgoffload {fgoffload.__version__}\n")


def test_a_training_with_offload_is_compared_and_drawn(capsys):
    assert main(["train", ARGUMENTS, "--steps", "3"]) == 0
    shown, said = capsys.readouterr()
    assert said == "training without offload: 3 steps\ntraining with offload: 3 steps\n"
    for row in ("losses equal to the bit", "gradients equal to the bit"):
        assert [line.split("│")[3].strip() for line in shown.splitlines() if row in line] == ["yes"]
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_without_offload_flags_runs_once_and_says_so(capsys):
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1", "--plot", "off.svg"]) == 0
    shown = capsys.readouterr().out
    assert "Trained once: offload is off." in shown
    assert "with offload" not in shown.replace("without offload", "")
    assert Path("off.svg").is_file()


def test_a_gradient_that_differs_ends_with_code_1_and_names_the_parameter(capsys, monkeypatch):
    from fgoffload.cli import measurement

    read_step = measurement._read_step

    def read_and_change(result):
        record = read_step(result)
        changes.append(record)
        if len(changes) == 4:  # the second step of the second training
            record.gradient_digests[next(iter(record.gradient_digests))] = "changed"
        return record

    changes = []
    monkeypatch.setattr(measurement, "_read_step", read_and_change)
    assert main(["train", ARGUMENTS, "--steps", "2"]) == 1
    first = next(iter(changes[0].gradient_digests))
    assert f"The gradients differ: first in step 2, {first}." in capsys.readouterr().out


def start(*arguments):
    # A shell that runs jobs in the background has them ignore SIGINT, and children inherit that; a user's terminal does not.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, earlier)


def interrupt(process):
    """Send what Ctrl-C sends, and return exit code, seconds until the end, stdout and stderr."""
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, time.monotonic() - started, out, err


@pytest.mark.parametrize("delay_seconds", [0.5, 2, 6, 9])
def test_ctrl_c_ends_a_training_within_two_seconds_and_leaves_nothing(delay_seconds):
    process = start("-m", "fgoffload", "train", ARGUMENTS, "--steps", "100000")
    time.sleep(delay_seconds)
    code, seconds, out, err = interrupt(process)
    assert code == 130
    assert seconds < INTERRUPT_SECONDS
    assert out == ""
    assert err.splitlines()[-1] == "fgoffload: interrupted"
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(Path().iterdir()) == []


def test_ctrl_c_ends_a_body_that_does_not_listen():
    code = """
import time
from fgoffload.cli.interrupt import end_soon_after_interrupt
with end_soon_after_interrupt(130):
    while True:
        try:
            print("started", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""
    process = start("-c", code)
    assert process.stdout.readline() == "started\n"
    code, seconds, _, err = interrupt(process)
    assert (code, err) == (130, "fgoffload: interrupted\n")
    assert seconds < INTERRUPT_SECONDS


def test_after_a_command_signals_are_as_before(capsys):
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    main(["train"])
    capsys.readouterr()
    after = signal.set_wakeup_fd(before)
    assert after == before
