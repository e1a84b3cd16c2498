"""Tests that argument files are parsed like bash, without running them."""

import subprocess
from pathlib import Path

import pytest

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.argument_files import Script, read_argument_file

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


def test_arrays_expand_as_in_bash(tmp_path: Path) -> None:
    path = tmp_path / "arguments.sh"
    path.write_text(SCRIPT)
    command = f"source {path}; set +u; printf '%s\\0' \"${{ALL[@]}}\""
    output = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout
    assert list(read_argument_file(path)) == output.split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#\n#\nA=(--x\n", r"line 3: the array that begins here is not closed. Close it"),
        ("A=(--x 'open)", "line 1: a quote is not closed"),
        ("A=(--x)\nif true; then\n", "line 2: the block that begins here is not closed. Close it with fi"),
        ("A=1", r"has no array of flags. Add one, for example MODEL_ARGS=\( --num-layers 4 \)\."),
    ],
)
def test_an_unterminated_construct_is_rejected_with_its_line(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Script(script, source="f.sh")


@pytest.mark.parametrize(
    ("name", "flags", "skipped"),
    [
        ("train", "--num-gpus 24 --log logs/x --fp8-format hybrid --bf16", ["if $PRECISION (line 7), if $KEY (line 9)"]),
        ("submit", "--num-layers 61 --moe-layer-freq [0]*3+[1]*58 --use-megatron-fsdp --strategy $STRATEGY", ["sbatch"]),
        ("options", "--seq-length 4096 --bf16 $(cat more.txt)", ["source (line 2)", "while (line 3)", "$(cat ...)"]),
    ],
)
def test_scripts_like_megatrons_examples_are_read_and_skipped_parts_are_listed(name, flags, skipped, caplog):
    path = Path(__file__).parent / "argument_scripts" / f"{name}.sh"
    assert read_argument_file(path, variables={"NODES": "2", "MFLAGS": "--x", "CALL": "x.py --y"}) == tuple(flags.split())
    assert [record.message.count(name) for record in caplog.records for name in skipped] == [1] * len(skipped)
    assert bool(caplog.records) == bool(skipped)


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("N=${NODES:-2}; D=(--nproc_per_node 8 --nnodes $N)\ntorchrun ${D[@]} x.py --bf16", 16),
        ("#SBATCH --nodes=2 --gres=gpu:8\nsrun sh -c 'torchrun --nnodes 2 --nproc-per-node=gpu x.py --bf16 2>&1'", 16),
        ("#SBATCH --nodes=2\nN=$SLURM_NNODES\ntorchrun --nnodes=$N --nproc-per-node=8 x.py --bf16", 16),
        ("#SBATCH -N 2 # nodes\n#SBATCH --ntasks-per-node 8\nsrun -l python x.py --bf16", 16),
        ("NUM_GPUS=8\nmpirun -np 64 python x.py --bf16", 64),
        ("#SBATCH --nodes=4 --gpus-per-node=8\nA=(--bf16)", 32),
        ("NUM_GPUS=$N\ntorchrun --nnodes $N --nproc_per_node 8 x.py --bf16", None),
    ],
)
def test_the_launch_command_sets_the_number_of_gpus(script, gpus):
    read = Script(script, source="f.sh")
    assert (read.flags, read.find_num_gpus()) == (("--bf16",), gpus)
