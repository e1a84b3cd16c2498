"""`fgoffload train` under torchrun: all processes train, one speaks."""

import os
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


# Python imports a module of this name before anything else.
START_LATE = """import os, time
if os.environ.get("LOCAL_RANK") == "{local_rank}":
    time.sleep(5)
"""
TOO_FEW_PROCESSES = (
    "fgoffload: error: arguments.sh and the command line: one copy of the model takes 4 processes (tensor x pipeline x "
    "context parallel sizes), and there are 2. Start a multiple of 4, as in torchrun --nproc-per-node 4 -m fgoffload train."
)


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


@pytest.mark.parametrize("late", [1])
def test_an_argument_file_for_more_processes_is_one_clear_error_whichever_process_is_late(monkeypatch, late):
    Path("customized").mkdir()
    Path("customized/sitecustomize.py").write_text(START_LATE.format(local_rank=late), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", "customized", prepend=os.pathsep)
    ended = torchrun("--tensor-model-parallel-size", "2")
    assert ended.returncode == 1  # torchrun's own
    said = [line for line in ended.stderr.splitlines() if line.startswith("fgoffload: ")]
    assert said == [TOO_FEW_PROCESSES]
