import subprocess
from pathlib import Path

import pytest

from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "arguments").glob("*.sh"))
NAMES = [path.name for path in FILES]
PRINT_ARRAYS = r"""
source "$1"
for name in $(compgen -A arrayvar); do
  case $name in BASH_* | DIRSTACK | FUNCNAME | GROUPS | PIPESTATUS) continue ;; esac
  declare -n array=$name
  printf '%s\n' "${array[@]}"
done
"""


def test_there_are_argument_files():
    assert "tiny_moe.sh" in NAMES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_argument_file_starts_with_a_comment_that_says_what_it_is(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#!")]
    assert lines[0].startswith("# ")
    assert len(lines[0]) > len("# a model")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_bash_accepts_an_argument_file(path):
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_argument_file_describes_a_training(path):
    training = parse_arguments(read_argument_file(path), source=str(path))
    assert training.transformer["num_layers"] >= 1


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_bash_reads_the_same_words_from_an_argument_file_as_we_do(path):
    shown = subprocess.run(
        ["bash", "-c", PRINT_ARRAYS, "bash", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    assert set(shown.splitlines()) >= set(read_argument_file(path))
