"""Argument files are read as bash reads them, without running anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.argument_files import parse_argument_file, read_argument_file

SCRIPT = """\
#!/bin/bash
# A comment with $( and ` in it.
set -euo pipefail
LAYERS=4
export NAME="a b"; EXTRA='--foo 1'
EMPTY=
MODEL_ARGS=(
    --num-layers ${LAYERS} # a comment
    --hidden-size ${HIDDEN:-64} \\
    --name "$NAME c#d \\"quoted\\"" $EXTRA $EMPTY
    --moe-layer-freq "([0]*1+[1]*3)" a#b ""
)
MODEL_ARGS+=(--more 'single $LAYERS')
ALL=("${MODEL_ARGS[@]}" --lr 1e-3 pre$EXTRA'post' "${EMPTY:-x}" "${EMPTY-y}")
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
def test_a_script_is_read_as_bash_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "arguments.sh"
    path.write_text(SCRIPT)

    assert list(read_argument_file(path)) == _read_with_bash(path, '"${ALL[@]}"')


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=(\n--x $(date)\n)", r"f.sh, line 2: command substitution cannot be read: '\$\(date\)'"),
        ("\nA=(--x $Y)", r"line 2: variable \$Y is not assigned above. Assign it before its use, or write \$\{Y:-default\}"),
        ("#\n#\nA=(--x\n", r"line 3: the array that begins here has no end. Close it with \)"),
        ("torchrun train.py", "line 1: a command cannot be read: 'torchrun'"),
        ("A=(--x 'open)", "line 1: a quote that is not closed"),
        ("A=(a & b)", "line 1: an operator cannot be read: '&'"),
        ("A=1", r"holds no array of flags. Write them as in: MODEL_ARGS=\( --num-layers 4 \)"),
    ],
)
def test_what_would_have_to_be_run_is_refused_with_its_line(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_argument_file(script, source="f.sh")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.sh: No such file"):
        read_argument_file(tmp_path / "missing.sh")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_argument_file(tmp_path / "binary.sh")


def _read_with_bash(path: Path, arrays: str) -> list[str]:
    command = f"source {path}; set +u; printf '%s\\0' {arrays}"
    output = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout
    return output.split("\0")[:-1]
