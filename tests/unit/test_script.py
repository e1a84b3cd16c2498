import os
import sys

import pytest

from fgoffload.cli.process import set_up_process
from fgoffload.cli.run import read_request
from fgoffload.cli.script import run_script, script_folder_first
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


def test_an_exception_goes_to_the_hook_that_the_script_has_set(script, capsys):
    path = script("import sys\nsys.excepthook = lambda kind, error, trace: print('hook', error)\nraise ValueError('own')")
    assert run_script(path, []) == 1
    assert capsys.readouterr().out == "hook own\n"


def test_a_script_that_is_no_python_is_shown_as_python_shows_it(script, capsys):
    path = script("def f(:\n")
    assert run_script(path, []) == 1
    said = capsys.readouterr().err
    assert f'File "{path}", line 1' in said
    assert "SyntaxError" in said
    assert "runpy" not in said


def test_an_interrupted_script_ends_with_what_shells_expect(script, capsys):
    assert run_script(script("raise KeyboardInterrupt"), []) == 130
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_modules_beside_the_script_come_first_and_the_path_is_put_back(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / "work" / "script.py")
    (tmp_path / "work" / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    rest = ["/one", "/two"]
    for first in ("", str(tmp_path), os.path.dirname(os.path.abspath(sys.argv[0]))):
        monkeypatch.setattr(sys, "path", [first, *rest])
        with script_folder_first("link.py"):
            assert sys.path == [str(tmp_path / "work"), *rest]  # a link's modules are where the file is, as for Python
        assert sys.path == [first, *rest]
    monkeypatch.setattr(sys, "path", list(rest))  # `python -P` puts nothing first
    with script_folder_first("link.py"):
        assert sys.path == [str(tmp_path / "work"), *rest]


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


def test_what_is_set_already_stays():
    environment = {"MASTER_ADDR": "host", "MASTER_PORT": "1"}
    set_up_process(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("host", "1")
    launched = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    before = dict(launched)
    assert set_up_process(launched) == 3
    assert launched == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "The environment has WORLD_SIZE and no RANK nor LOCAL_RANK. Start with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "The environment has RANK and WORLD_SIZE and no LOCAL_RANK."),
        ({"RANK": "zero", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='zero', which is no number"),
    ],
)
def test_an_environment_that_a_launcher_left_half_is_refused(environment, message):
    with pytest.raises(ConfigError) as caught:
        set_up_process(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ([], (), ()),
        (["--lr", "1", "--", "x"], (), ("--lr", "1", "--", "x")),
    ],
)
def test_words_after_the_script_are_its_own(script, words, options, rest):
    request = read_request([script(""), *words])
    assert (request.torchrun_options, request.words) == (options, rest)


def test_words_before_two_dashes_are_torchruns(script):
    path = script("")
    request = read_request(["--nproc-per-node", "2", "--", path, "--a", "--", "b"])
    assert (request.torchrun_options, request.script) == (("--nproc-per-node", "2"), path)
    assert request.words == ("--a", "--", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SCRIPT.py is missing. Give it before its flags"),
        (["--"], "SCRIPT.py is missing. Give it before its flags"),
        (["--nproc-per-node", "2", "--"], "SCRIPT.py is missing"),
        (["--nproc-per-node", "2", "--", "--lr"], "SCRIPT.py is missing"),
        (
            ["--nproc-per-node", "2", "x.py"],
            "--nproc-per-node stands where the script should. Options for torchrun end with --",
        ),
        (["none.py", "--lr", "1"], "script 'none.py' does not exist. Give the Python file that trains"),
        (["."], "script '.' is a folder."),
    ],
)
def test_words_without_a_script_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        read_request(words)
    assert message in str(caught.value)
