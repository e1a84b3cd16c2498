import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """#!/bin/sh
# Python with another version number: `make` asks for it with -c, and makes the environment with -m venv.
[ "$1" = -m ] && exec mkdir -p "$3/bin"
exec {python} -c 'import sys; sys.version_info = {version}; exec(sys.argv[1])' "$2"
"""


def make_environment(folder, version):
    """Return how `make` ends when Python is of `version`, up to the environment that it would install into."""
    shutil.copy(ROOT / "Makefile", folder)
    fake = folder / "fake-python"
    fake.write_text(FAKE.format(python=sys.executable, version=version), encoding="utf-8")
    fake.chmod(0o755)
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={fake}", ".venv/bin/python"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("version", [(3, 9, 18)])
def test_a_python_that_is_too_old_or_too_new_is_refused_before_anything_is_made(tmp_path, version):
    ended = make_environment(tmp_path, version)
    assert ended.returncode == 2
    assert f"Python 3.10 to 3.13 is needed, this is {version[0]}.{version[1]}. Give one, as in: make PYTHON=" in ended.stderr
    assert not (tmp_path / ".venv").exists()
