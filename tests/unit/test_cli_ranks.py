"""`fgoffload train` under torchrun: all processes train, one speaks."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ARGUMENTS = """#!/usr/bin/env bash
ARGS=(
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4
    --swiglu --disable-bias-linear --pipeline-model-parallel-size 2 --train-iters 3
    --fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 0
)
"""


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("arguments.sh").write_text(ARGUMENTS, encoding="utf-8")


def torchrun(*flags, processes=2):
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *("-m", "fgoffload", "train", "arguments.sh", *flags),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_two_processes_train_and_one_shows_the_results_of_both():
    ended = torchrun()
    assert ended.returncode == 0, ended.stderr
    rows = ended.stdout.splitlines()
    for row in ("losses equal to the bit", "gradients equal to the bit", "core_attn, to host / back"):
        assert len([line for line in rows if row in line]) == 1
    assert [line for line in rows if "equal to the bit" in line and "yes" not in line] == []
    assert "arguments.sh: 2 layers on 2 x CPU" in ended.stdout
    assert "2 ranks: all compared" in ended.stdout
    assert " of rank " in next(line for line in rows if "where it is now" in line)
    # The first stage computes no loss; what is shown is the last one's.
    assert "nan" not in ended.stdout
    assert ended.stderr.count("training with offload: 3 steps") == 1
    assert Path("memory.png").is_file()
