"""Tests how the command line ends for reasons other than its input: missing packages, closed pipes, Ctrl-C."""

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
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_without(package, *arguments):
    code = f"import sys; sys.modules[{package!r}] = None; from fgoffload.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["torch", "megatron"])
def test_a_package_that_is_not_installed_is_named_with_how_to_install_it(package):
    ended = run_without(package, "train", ARGUMENTS)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith(f"fgoffload: error: {package}")
    assert "pip install 'fgoffload[megatron]'" in ended.stderr


def test_a_reader_that_leaves_ends_the_command_without_a_traceback():
    Path("off.sh").write_text(OFF, encoding="utf-8")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "fgoffload", "train", "off.sh", "--steps", "1"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        # Buffered, as for users: what Python has not written yet it would try again at exit.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(write_end)
    assert process.returncode == 141
    assert_messages(process.stderr, "training without offload: 1 step")
    assert Path("memory.png").is_file()


def start(*arguments):
    # A shell that runs jobs in the background has them ignore SIGINT, and children inherit that; a user's terminal does not.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
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


def measure_crowding():
    """Return how much longer than its CPU time a process takes now: 1 if nothing else runs."""
    wall, own = time.monotonic(), time.process_time()
    while time.process_time() - own < 0.1:
        pass
    return max(1.0, (time.monotonic() - wall) / (time.process_time() - own))


def test_ctrl_c_ends_a_training_within_two_seconds_and_leaves_nothing():
    process = start("-m", "fgoffload", "train", ARGUMENTS, "--steps", "100000")
    time.sleep(2)
    before = measure_crowding()
    code, seconds, out, err = interrupt(process)
    assert code == 130
    assert seconds < INTERRUPT_SECONDS * max(before, measure_crowding())
    assert out == ""
    assert err.splitlines()[-1] == "fgoffload: interrupted"
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(Path().iterdir()) == []
