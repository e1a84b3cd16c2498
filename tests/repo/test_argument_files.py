"""Tests that bash and Megatron accept the files in `arguments/`, and that parameter counts match published ones."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
from support.versions import is_installed

from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_model_file
from fgoffload.planner.memory.saved_bytes import count_tag_bytes
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model.parameters import count_rank_parameters
from fgoffload.planner.model.rank_layer import make_layer_shape
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "arguments").glob("*.sh"))
PRINT_ARRAYS = r"""
source "$1"
for name in $(compgen -A arrayvar); do
  case $name in BASH_* | DIRSTACK | FUNCNAME | GROUPS | PIPESTATUS) continue ;; esac
  declare -n array=$name
  printf '%s\n' "${array[@]}"
done
"""
PUBLISHED = {
    # Billions of parameters without MTP layers, and the number of GPUs of the published run.
    "deepseek_v3": (671, 1024),
    "deepseek_v2_lite": (15.7, 8),
    "qwen3_30b_a3b": (30.5, 32),
    "qwen3_235b_a22b": (235, 256),
    "mixtral_8x7b": (46.7, 64),
    "kimi_k2": (1026, 1024),  # 1.04 trillion in the report, 1.026 in the checkpoint
    "gpt_oss_120b": (116.8, 64),
    "llama3_8b": (8.03, 8),
    "llama3_70b": (70.6, 64),
    "llama3_405b": (405.9, 1024),
    "mixtral_8x22b": (140.6, 128),
}


@pytest.mark.filterwarnings("ignore:Using a large number of experts")  # Megatron suggests a router dtype
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_bash_and_megatron_accept_every_argument_file(path):
    command = ["bash", "-c", PRINT_ARRAYS, "bash", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}).stdout
    words = read_argument_file(path)
    assert set(shown.splitlines()) >= set(words)
    if "--fine-grained-offloading-max-inflight-offloads" in words and not is_installed("0.18"):
        pytest.skip("a full iteration graph with offload needs megatron-core 0.18")
    # Fused permutation needs Transformer Engine.
    training = parse_arguments([*words, "--no-moe-permute-fusion"], source=str(path))
    config = build_transformer_config(training, offload=training.offload)
    assert config.num_layers == training.transformer["num_layers"] >= 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_of_argument_files_match_published_ones(name, caplog):
    billions, gpus = PUBLISHED[name]
    model, parallelism = read_model_file(ROOT / "arguments" / f"{name}.sh")
    assert caplog.records == []
    decoder = dataclasses.replace(model, mtp_num_layers=0)
    assert count_rank_parameters(decoder, Parallelism(), 0).count / 1e9 == pytest.approx(billions, rel=2e-3)
    assert parallelism.world_size == gpus
    layers = [number for rank in list_chunks(model, parallelism) for chunk in rank for number in chunk.layers]
    assert sorted(layers) == list(model.numbers)
    for number in (0, model.num_layers - 1, model.numbers[-1]):
        assert count_tag_bytes(make_layer_shape(model, parallelism, number))["core_attn"] > 0
