"""Tests exits of the command line for missing packages, closed pipes and Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import ARGUMENTS, OFF, assert_messages

INTERRUPT_SECONDS = 2.0


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_without(package, *arguments):
    code = f"import sys; sys.modules[{package!r}] = None; from fgoffload.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["torch", "megatron"])
def test_a_missing_package_is_named_with_its_install_command(package):
    ended = run_without(package, "train", ARGUMENTS)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith(f"fgoffload: error: {package}")
    assert "pip install 'fgoffload[megatron]'" in ended.stderr


def test_a_closed_pipe_ends_the_command_without_a_traceback():
    Path("off.sh").write_text(OFF, encoding="utf-8")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "fgoffload", "train", "off.sh", "--steps", "1"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        # Buffered output, as for users: at exit Python tries to write the rest again.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(write_end)
    assert process.returncode == 141
    assert_messages(process.stderr, "training without offload: 1 step")
    assert Path("memory.png").is_file()


def start(*arguments):
    # Background jobs of a shell ignore SIGINT, and their children inherit this. Commands in a terminal do not ignore it.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, earlier)


def interrupt(process):
    """Send SIGINT like Ctrl-C, and return the exit code, the seconds until exit, stdout and stderr."""
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, time.monotonic() - started, out, err


def measure_slowdown():
    """Return the ratio of wall time to CPU time of a busy process: 1 on an idle machine."""
    wall, own = time.monotonic(), time.process_time()
    while time.process_time() - own < 0.1:
        pass
    return max(1.0, (time.monotonic() - wall) / (time.process_time() - own))


def test_ctrl_c_ends_training_within_two_seconds_and_leaves_nothing():
    process = start("-m", "fgoffload", "train", ARGUMENTS, "--steps", "100000")
    time.sleep(2)
    before = measure_slowdown()
    code, seconds, out, err = interrupt(process)
    assert code == 130
    assert seconds < INTERRUPT_SECONDS * max(before, measure_slowdown())
    assert out == ""
    assert err.splitlines()[-1] == "fgoffload: interrupted"
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(Path().iterdir()) == []
