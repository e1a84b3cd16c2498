import sys

import pytest

from fgoffload.cli.launch import set_up_process
from fgoffload.cli.run import read_request
from fgoffload.cli.script import run_script
from fgoffload.errors import ConfigError


@pytest.fixture(autouse=True)
def _python_shows_exceptions(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's, set by an earlier test, names the rank in each line


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_the_exit_code_is_the_scripts(script, capsys, text, code, said):
    assert run_script(script(text), []) == code
    assert capsys.readouterr().err == said


def test_a_script_sees_what_python_would_give_it(script, capsys):
    path = script("import sys; print(__name__, __file__, sys.argv, sys.modules['__main__'].__file__)")
    before = list(sys.argv)
    assert run_script(path, ["--a", "b"]) == 0
    assert capsys.readouterr().out == f"__main__ {path} {[path, '--a', 'b']} {path}\n"
    assert sys.argv == before


def test_an_exception_is_shown_with_the_scripts_own_traceback(script, capsys):
    path = script("def train():\n    raise IndexError('own')\n\ntrain()\n")
    assert run_script(path, []) == 1
    said = capsys.readouterr().err
    assert said.startswith(f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n')
    assert said.endswith("IndexError: own\n")
    assert "runpy" not in said
    assert "fgoffload" not in said


def test_a_single_process_gets_what_megatron_asks_for():
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
def test_an_environment_that_a_launcher_left_half_is_refused(environment, message):
    with pytest.raises(ConfigError) as caught:
        set_up_process(environment)
    assert message in str(caught.value)


def test_words_before_two_dashes_are_torchruns(script):
    path = script("")
    request = read_request(["--nproc-per-node", "2", "--", path, "--a", "--", "b"])
    assert (request.torchrun_options, request.script) == (("--nproc-per-node", "2"), path)
    assert request.words == ("--a", "--", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SCRIPT.py is missing. Pass it before its flags"),
        (["--nproc-per-node", "2", "x.py"], "--nproc-per-node comes before the script. Put flags of the script after it"),
        (["--offload-window", "1GiB", "--", "x.py"], "--offload-window comes before the script. Put --offload-window after it"),
        (["--offload-memory-budgt=1GiB", "x.py"], "--offload-memory-budgt comes before the script. Put --offload-memory-"),
        (["none.py", "--lr", "1"], "script 'none.py' does not exist. Pass a Python training script"),
    ],
)
def test_words_without_a_script_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        read_request(words)
    assert message in str(caught.value)
