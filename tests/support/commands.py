"""Runs Python scripts and modules one after another, each in a fork of one process.

Importing transformers takes longer than a small training run. So the process imports the shared packages once, and hides
optional packages that transformers would import if they are installed.

Tests import `run_commands`, which runs this file as a script: the process that forks for each command.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NOT_NEEDED = ("bitsandbytes", "datasets", "pandas", "peft", "scipy", "sklearn", "tensorboard")
"""Packages that transformers imports if they are installed. A tiny training of Llama uses none of them."""
TIMEOUT_SECONDS = 100
"""The timeout of all commands together."""


def run_commands(
    *commands: Sequence[str], imports: Sequence[str] = (), without: Sequence[str] = NOT_NEEDED
) -> list[subprocess.CompletedProcess[str]]:
    """Run `commands` one after another, and return their results.

    Args:
        commands: A Python file or a module name as for `python -m`, each with its arguments.
        imports: Modules to import once for all commands.
        without: Packages to hide, as if they were not installed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    imports = imports if sys.platform == "linux" else ()  # some macOS libraries do not work after a fork
    with tempfile.TemporaryDirectory() as folder:
        first = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, folder, json.dumps([commands, imports, without])],
            env={**environment, "PYTHONWARNINGS": "ignore"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if first.returncode != 0:
            raise AssertionError(first.stderr)
        outputs = [
            [(Path(folder) / f"{kind}-{number}").read_text() for kind in ("out", "err")] for number in range(len(commands))
        ]
        codes = json.loads(first.stdout.splitlines()[-1])
    return [
        subprocess.CompletedProcess(command, code, out, err)
        for command, code, (out, err) in zip(commands, codes, outputs, strict=True)
    ]


def _run_all(folder: Path, commands: Sequence[Sequence[str]], imports: Sequence[str], without: Sequence[str]) -> None:
    sys.modules.update(dict.fromkeys(without))
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # so that collections in forks do not copy all shared pages
    codes = []
    for number, words in enumerate(commands):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for descriptor, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{kind}-{number}", os.O_WRONLY | os.O_CREAT), descriptor)
            _run(words)
            return
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.write(json.dumps(codes) + "\n")


def _run(words: Sequence[str]) -> None:
    sys.argv[:] = words
    if words[0].endswith(".py"):
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.path[0] = os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_all(Path(sys.argv[1]), *json.loads(sys.argv[2]))
