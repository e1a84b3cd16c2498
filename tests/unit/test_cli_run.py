"""Tests `fgoffload run` in separate processes, with a training script like Megatron-LM's."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from fgoffload.errors import BudgetError

SCRIPT = str(Path(__file__).parents[1] / "support" / "megatron_lm" / "pretrain_tiny.py")
TAGS = ("attn_norm", "core_attn", "attn_proj", "mlp_act")
MODEL = ("--num-layers", "2")
ON = ("--fine-grained-activation-offloading", "--offload-modules", *TAGS, "--min-offloaded-tensor-size", "1")
OURS = ("--offload-window", "1KiB", "--offload-prefetch", "1KiB", "--offload-host-budget", "64MiB")
"""Flags that Megatron-LM does not have."""


def start(*words, program=("-m", "fgoffload", "run"), **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", **variables},
    )


def list_lines(ended):
    """Return the lines that fgoffload printed, except the script's own line about running on a CPU."""
    return [line for line in ended.stderr.splitlines() if line.startswith("fgoffload: ") and "runs on the CPU" not in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the process and the result of the script without offload flags."""
    result = tmp_path_factory.mktemp("plain") / "result"
    ended = start(SCRIPT, *MODEL, "--result", str(result))
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads(result.with_suffix(".0.json").read_text())


def read(result, rank=0):
    return json.loads(result.with_suffix(f".{rank}.json").read_text())


def get_computed(found):
    return {name: found[name] for name in ("losses", "parameters")}


def test_without_our_flags_the_script_runs_unchanged_and_one_line_reports_offload_off(plain):
    ended, found = plain
    assert list_lines(ended) == [
        f"fgoffload: waiting for {SCRIPT} to create a transformers Trainer. For Megatron-Core, add "
        "--fine-grained-activation-offloading."
    ]
    assert found["argv"][0] == SCRIPT
    assert found["path"] == str(Path(SCRIPT).parent)
    assert found["environment"] == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NVTE_CPU_OFFLOAD_V1": None}
    assert len(found["losses"]) == 4


def test_with_our_flags_results_are_bitwise_identical_and_one_line_reports_offload(plain, tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, *OURS, "--transformer-impl", "local", "--result", str(tmp_path / "result"))
    assert ended.returncode == 0, ended.stderr
    (line,) = list_lines(ended)
    assert line.startswith(
        "fgoffload: Activation offload is on for attn_norm core_attn attn_proj mlp_act. "
        f"Megatron-Core {version('megatron-core')} is in "
    )
    found = read(tmp_path / "result")
    assert get_computed(found) == get_computed(plain[1])
    assert not found["switch"]
    assert found["environment"]["NVTE_CPU_OFFLOAD_V1"] is None


REAL_PARSER = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --lr 0.01 "
    "--train-iters 2 --vocab-size 32 --tokenizer-type NullTokenizer --transformer-impl local --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --distributed-backend gloo"
)


@pytest.mark.parametrize("place", ["a wheel", "beside the script"])
def test_a_script_with_megatrons_own_parser_is_bitwise_identical(place, plain, tmp_path):
    installed = Path(distribution("megatron-core").locate_file("megatron/training"))
    if not installed.exists():
        pytest.skip("wheels contain Megatron-LM's training code since megatron-core 0.18")
    script = shutil.copy(SCRIPT, tmp_path)
    if place != "a wheel":
        (tmp_path / "megatron").mkdir()
        (tmp_path / "megatron" / "training").symlink_to(installed)
    ended = start(script, *MODEL, *REAL_PARSER.split(), *ON, *OURS, "--result", str(tmp_path / "result"))
    assert ended.returncode == 0, ended.stderr
    assert get_computed(read(tmp_path / "result")) == get_computed(plain[1])


def test_invalid_offload_flags_exit_with_code_2_before_the_script_starts(tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, "--offload-window", "1PB", "--result", str(tmp_path / "result"))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("fgoffload: error: --offload-window '1PB' is not a size.")
    assert not list(tmp_path.iterdir())


def test_a_single_process_has_no_rank_unless_the_script_imports_megatron(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nraise SystemExit('RANK' in os.environ)")
    assert start(str(script)).returncode == 0


def test_help_lists_our_flags_without_importing_torch():
    code = "import sys; sys.modules['torch'] = None; from fgoffload.cli import main; main(['run', '--help'])"
    ended = start(program=("-c", code))
    assert ended.returncode == 0, ended.stderr
    assert "--fine-grained-activation-offloading" in ended.stdout
    assert "torchrun --nproc-per-node 8 -m fgoffload run pretrain_gpt.py ..." in ended.stdout


def test_errors_of_other_ranks_name_the_rank():
    from fgoffload.cli.run import _rank_in_errors

    with pytest.raises(BudgetError, match=r"^rank 1: No plan fits\. Use a budget of \S+ or more") as caught, _rank_in_errors(1):
        raise BudgetError("No plan fits.", 5 << 20)
    assert caught.value.least_bytes == 5 << 20
