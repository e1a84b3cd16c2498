"""The argument files of the benchmark."""

from pathlib import Path

import pytest

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.model_flop import count_model_flop
from fgoffload.benchmark.settings import NOTHING, list_default_settings
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import build_transformer_config

ROOT = Path(__file__).parents[3]
NAMES = ("w2_moe", "launch_bound_moe", "mla_moe", "llama3_8b_layers", "w2_moe_1f1b")


def load(name):
    flags = read_argument_file(ROOT / "arguments" / f"{name}.sh")
    job = Job(source=f"{name}.sh", file_flags=flags, warmup=1, steps=1, plan_folder=Path())
    return parse_setting_arguments(job, NOTHING)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_a_training_that_megatron_builds_in_bf16_with_transformer_engine(name):
    arguments = load(name)
    config = build_transformer_config(arguments, offload=None)
    assert str(config.params_dtype) == "torch.bfloat16"
    assert config.transformer_impl == "transformer_engine"
    assert (config.hidden_dropout, config.attention_dropout) == (0, 0)
    assert list_default_settings(arguments.transformer)[0] == NOTHING


def test_the_reference_workload_is_what_the_results_are_said_of():
    arguments = load("w2_moe")
    config = build_transformer_config(arguments, offload=None)
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (6, 4096, 32)
    assert (config.num_moe_experts, config.moe_ffn_hidden_size, config.moe_router_topk) == (16, 2048, 4)
    assert (arguments.seq_length, arguments.micro_batch_size, arguments.num_microbatches) == (4096, 2, 4)
    # 8 x 4096 tokens. Attention: 4 x 4096^2 and half of 4096 tokens, twice. Experts: 4 of 3 x 4096 x 2048. Output: 32000.
    layer = 2 * 4 * 4096**2 + 2 * 2 * 4096 * 2048 + 2 * 4 * 3 * 4096 * 2048 + 2 * 4096 * 16
    assert count_model_flop(arguments, config) == 3 * 8 * 4096 * (6 * layer + 2 * 4096 * 32000)


def test_the_pipeline_has_the_layers_of_the_reference_workload_on_each_of_two_processes():
    one, two = load("w2_moe"), load("w2_moe_1f1b")
    assert two.world_size == 2
    differ = {name for name in two.transformer if two.transformer[name] != one.transformer.get(name)}
    assert differ == {"num_layers", "pipeline_model_parallel_size"}
    assert two.transformer["num_layers"] == 2 * one.transformer["num_layers"]


def test_layers_of_llama_can_be_given_in_the_environment():
    path = ROOT / "arguments" / "llama3_8b_layers.sh"
    flags = read_argument_file(path, variables={"LAYERS": "32"})
    assert flags[flags.index("--num-layers") + 1] == "32"
    assert "28" in read_argument_file(path)
