"""`fgoffload run`, as users start it: in processes of its own, on a script in the shape of Megatron-LM's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[1] / "support" / "megatron_lm" / "pretrain_tiny.py")
TAGS = ("attn_norm", "core_attn", "attn_proj", "mlp_act")
MODEL = ("--num-layers", "2")
ON = ("--fine-grained-activation-offloading", "--offload-modules", *TAGS, "--min-offloaded-tensor-size", "1")
OURS = ("--offload-window", "1KiB", "--offload-prefetch", "1KiB", "--offload-host-budget", "64MiB")
"""No Megatron-LM knows these."""


def start(*words, program=("-m", "fgoffload", "run"), **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", **variables},
    )


def list_lines(ended):
    """Return what this program said, but for the script's own line about running on a CPU."""
    return [line for line in ended.stderr.splitlines() if line.startswith("fgoffload: ") and "runs on the CPU" not in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the script computes without offload, started by this command."""
    result = tmp_path_factory.mktemp("plain") / "result"
    ended = start(SCRIPT, *MODEL, "--result", str(result))
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads(result.with_suffix(".0.json").read_text())


def read(result, rank=0):
    return json.loads(result.with_suffix(f".{rank}.json").read_text())


def compute_of(found):
    return {name: found[name] for name in ("losses", "parameters")}


def test_without_our_flags_the_script_runs_as_it_is_and_one_line_says_that_offload_is_off(plain):
    ended, found = plain
    assert list_lines(ended) == [
        f"fgoffload: offload is off: {SCRIPT} runs as it is. Switch it on with --fine-grained-activation-offloading."
    ]
    assert found["argv"][0] == SCRIPT
    assert found["path"] == str(Path(SCRIPT).parent)
    assert found["environment"] == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NVTE_CPU_OFFLOAD_V1": None}
    assert len(found["losses"]) == 4


def test_with_them_it_computes_the_same_bits_and_one_line_says_what_was_applied(plain, tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, *OURS, "--transformer-impl", "local", "--result", str(tmp_path / "result"))
    assert ended.returncode == 0, ended.stderr
    (line,) = list_lines(ended)
    assert line.startswith("fgoffload: Activation offload of attn_norm core_attn attn_proj mlp_act: ")
    assert "symbols of megatron.core are replaced. Megatron's own call sites for attn_norm core_attn attn_proj are on" in line
    assert "by its config, and the script does not get its flags, since it refuses them with --transformer-impl local." in line
    assert "Megatron-Core 0.16.1 is that of " in line
    found = read(tmp_path / "result")
    assert compute_of(found) == compute_of(plain[1])
    assert not found["switch"]
    assert found["environment"]["NVTE_CPU_OFFLOAD_V1"] is None


def test_a_script_that_takes_megatrons_flags_gets_the_part_that_megatron_accepts(plain, tmp_path):
    (tmp_path / "pynvml.py").touch()
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "cuda" / "bindings" / "__init__.py").touch()
    ended = start(SCRIPT, *MODEL, *ON, *OURS, "--result", str(tmp_path / "result"), PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "call sites for attn_norm core_attn attn_proj are on by its flags." in list_lines(ended)[0]
    found = read(tmp_path / "result")
    assert compute_of(found) == compute_of(plain[1])
    assert (found["switch"], found["modules"], found["size"]) == (True, ["attn_norm", "core_attn", "attn_proj"], 1)
    assert found["environment"]["NVTE_CPU_OFFLOAD_V1"] == "1"  # the script's check asked for it


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fgoffload", "run")
"""What the command `torchrun` runs."""


@pytest.mark.parametrize(
    ("program", "launcher", "code"),
    [
        (("-m", "fgoffload", "run"), ("--standalone", "--nproc-per-node", "2", "--"), 7),
        (TORCHRUN, (), 1),  # torchrun's own code, whatever that of the processes is
    ],
    ids=["our command starts torchrun", "torchrun starts our command"],
)
def test_two_processes_of_torchrun_compute_the_same_bits_and_one_of_them_speaks(program, launcher, code, plain, tmp_path):
    words = (*launcher, SCRIPT, *MODEL, *ON, *OURS, "--exit", "7", "--result", str(tmp_path / "result"))
    ended = start(*words, program=program)
    assert ended.returncode == code, ended.stderr
    (line,) = [line for line in list_lines(ended) if "Activation offload" in line]
    assert list_lines(ended) == [line]
    assert compute_of(read(tmp_path / "result", 0)) == compute_of(plain[1])
    second = read(tmp_path / "result", 1)
    assert second["environment"]["WORLD_SIZE"] == "2"
    assert compute_of(second) != compute_of(plain[1])  # it trains on other data


def start_with_tag(tag, result):
    return start(SCRIPT, *MODEL, "--fine-grained-activation-offloading", "--offload-modules", tag, "--result", str(result))


def test_a_tag_without_a_site_ends_the_script_after_its_first_step(tmp_path):
    ended = start_with_tag("gdp_qkv", tmp_path / "result")
    assert ended.returncode == 1
    assert "--offload-modules 'gdp_qkv' has no site in this model on any rank" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_tag_that_the_scripts_flags_leave_without_a_site_ends_it_before_it_starts(tmp_path):
    ended = start_with_tag("expert_fc1", tmp_path / "result")
    assert ended.returncode == 2
    assert "--offload-modules 'expert_fc1' is of layers with experts, and this model has none" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_script_that_trains_no_megatron_model_is_warned_of_at_its_end(tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, "--without-model", "--result", str(tmp_path / "result"))
    assert ended.returncode == 0, ended.stderr
    assert list_lines(ended)[-1] == (
        f"fgoffload: warning: {SCRIPT} ran no model of that Megatron-Core forward, so nothing was offloaded. Give a script "
        "that trains one, or leave our flags out."
    )


def test_an_exception_of_the_script_is_its_own(tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, "--raise-at-end", "--result", str(tmp_path / "result"))
    assert ended.returncode == 1
    # torch's hook for processes of a group names the rank in each line.
    lines = [line.removeprefix("[rank0]: ") for line in ended.stderr.splitlines()]
    trace = lines[lines.index("Traceback (most recent call last):") + 1 :]
    assert trace[0].startswith(f'  File "{SCRIPT}", line')
    assert trace[-1] == "IndexError: the script's own"
    assert "runpy" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--offload-window", "1PB"), "the command line: --offload-window '1PB' is not a size."),
        (
            ("--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
            "the command line: --offload-modules 'core_attn' and --recompute-modules 'core_attn' exclude each other",
        ),
    ],
)
def test_an_error_of_ours_is_one_line_with_code_2_before_the_script_starts(tmp_path, flags, message):
    ended = start(SCRIPT, *MODEL, *ON, *flags, "--result", str(tmp_path / "result"))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"fgoffload: error: {message}")
    assert not list(tmp_path.iterdir())


def test_in_another_rank_an_error_names_it(tmp_path):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    ended = start(SCRIPT, *MODEL, *ON, "--offload-window", "1PB", "--result", str(tmp_path / "result"), **ranks)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith("fgoffload: error: rank 1: the command line: --offload-window '1PB'")


def test_with_torchrun_an_error_of_ours_is_one_line_before_any_process_starts(tmp_path):
    ended = start(
        "--nproc-per-node", "2", "--", SCRIPT, *MODEL, *ON, "--offload-window", "1PB", "--result", str(tmp_path / "r")
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith("fgoffload: error: the command line: --offload-window '1PB'")


def test_an_option_that_torchrun_does_not_know_is_torchruns_to_refuse():
    ended = start("--no-such-option", "--", SCRIPT, *MODEL)
    assert ended.returncode == 2
    assert "--no-such-option" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_flag_that_nobody_knows_is_the_scripts_to_refuse(tmp_path):
    ended = start(SCRIPT, *MODEL, *ON, "--offload-module", "x", "--result", str(tmp_path / "result"))
    assert ended.returncode == 2
    assert "unrecognized arguments: --offload-module x" in ended.stderr


def test_the_help_names_our_flags_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from fgoffload.cli import main; main(['run', '--help'])"
    ended = start(program=("-c", code))
    assert ended.returncode == 0, ended.stderr
    assert "--fine-grained-activation-offloading" in ended.stdout
    assert "torchrun --nproc-per-node 8 -m fgoffload run pretrain_gpt.py FLAGS" in ended.stdout
