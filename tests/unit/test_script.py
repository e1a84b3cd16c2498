"""Tests scripts run by `fgoffload run`: arguments, environment, exit codes and tracebacks."""

import sys

import pytest

from fgoffload.cli.launch import set_up_process
from fgoffload.cli.run import read_request
from fgoffload.cli.script import run_script
from fgoffload.errors import ConfigError


@pytest.fixture(autouse=True)
def _default_excepthook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch replaces it if an earlier test imported it


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_exit_code_and_stderr_match_the_script(script, capsys, text, code, stderr):
    assert run_script(script(text), []) == code
    assert capsys.readouterr().err == stderr


def test_a_script_sees_the_same_globals_and_argv_as_under_python(script, capsys):
    path = script("import sys; print(__name__, __file__, sys.argv, sys.modules['__main__'].__file__)")
    before = list(sys.argv)
    assert run_script(path, ["--a", "b"]) == 0
    assert capsys.readouterr().out == f"__main__ {path} {[path, '--a', 'b']} {path}\n"
    assert sys.argv == before


def test_tracebacks_contain_only_frames_of_the_script(script, capsys):
    path = script("def train():\n    raise IndexError('own')\n\ntrain()\n")
    assert run_script(path, []) == 1
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n')
    assert err.endswith("IndexError: own\n")
    assert "runpy" not in err
    assert "fgoffload" not in err


def test_a_single_process_gets_the_variables_that_megatron_reads():
    environment = {"PATH": "x"}
    assert set_up_process(environment) == 0
    port = environment.pop("MASTER_PORT")
    assert 1024 <= int(port) < 65536
    assert environment == {
        "PATH": "x",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "the environment sets WORLD_SIZE, but not all of RANK, WORLD_SIZE and LOCAL_RANK. Start"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the environment sets RANK and WORLD_SIZE, but not all of"),
        ({"RANK": "zero", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='zero', which is not a number"),
    ],
)
def test_an_incomplete_launcher_environment_is_rejected(environment, message):
    with pytest.raises(ConfigError) as caught:
        set_up_process(environment)
    assert message in str(caught.value)


def test_arguments_before_a_double_dash_go_to_torchrun(script):
    path = script("")
    request = read_request(["--nproc-per-node", "2", "--", path, "--a", "--", "b"])
    assert (request.torchrun_options, request.script) == (("--nproc-per-node", "2"), path)
    assert request.words == ("--a", "--", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SCRIPT.py is missing. Pass it before its flags"),
        (["--nproc-per-node", "2", "x.py"], "--nproc-per-node comes before the script. Put the script's flags after it"),
        (["--offload-window", "1GiB", "--", "x.py"], "--offload-window comes before the script. Put --offload-window after it"),
        (["--offload-memory-budgt=1GiB", "x.py"], "--offload-memory-budgt comes before the script. Put --offload-memory-"),
        (["none.py", "--lr", "1"], "script 'none.py' does not exist. Pass a Python training script"),
    ],
)
def test_arguments_without_a_script_are_rejected(words, message):
    with pytest.raises(ConfigError) as caught:
        read_request(words)
    assert message in str(caught.value)
