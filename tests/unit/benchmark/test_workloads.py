"""The argument files of the benchmark, and the plans for the reference workload."""

from pathlib import Path

import pytest

from fgoffload import Action, OffloadPlan, default_tags
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.model_flop import count_model_flop
from fgoffload.benchmark.settings import NOTHING, list_default_settings
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import build_transformer_config
from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape
from fgoffload.tags import find_recompute_unit

ROOT = Path(__file__).parents[3]
NAMES = ("w2_moe", "launch_bound_moe", "mla_moe", "llama3_8b_layers", "w2_moe_1f1b")
PLANS = sorted((ROOT / "examples" / "benchmarks" / "plans").glob("*.json"))
W2_LAYER = LayerShape(
    micro_batch_size=2,
    seq_length=4096,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    qk_channels=128,
    v_channels=128,
    experts=ExpertsShape(num_experts=16, topk=4, ffn_hidden_size=2048),
)
LAYERS = 6


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


def test_there_are_plans_for_the_reference_workload():
    assert len(PLANS) == 8


@pytest.mark.parametrize("path", PLANS, ids=[path.stem for path in PLANS])
def test_a_plan_names_sites_that_the_reference_workload_has(path):
    # The norm before attention is a part of Transformer Engine's linear there, and nothing is dense.
    sites = {tag for tensor in list_saved_tensors(W2_LAYER) for tag in tensor.tags}
    units = {"layer", "core_attn", "mlp_norm", "moe", "moe_act"}
    for site, action in OffloadPlan.load(path).actions.items():
        assert site.chunk == 0
        assert site.layer in range(LAYERS)
        assert site.tag in sites if action.offloads else site.tag in units
        if action.recomputes:
            assert find_recompute_unit(site.tag) is not None
        if site.tag in default_tags():
            for required in default_tags().get(site.tag).requires:
                assert (site.layer, required) in {(one.layer, one.tag) for one in OffloadPlan.load(path).actions}


def count_freed(plan):
    """Return the bytes of a microbatch that a plan recomputes, and those that leave, by the formulas."""
    recomputed_bytes = moved_bytes = 0
    for layer in range(LAYERS):
        actions = plan.list_layer(0, layer)
        units = [find_recompute_unit(name) for name, action in actions.items() if action.recomputes]
        for tensor in list_saved_tensors(W2_LAYER):
            if tensor.name == "output of the norm before the MLP":
                # The experts run again from it, and the norm makes it.
                is_dropped = any(unit.name == "mlp_norm" for unit in units)
            else:
                is_dropped = any(set(tensor.tags) <= set(unit.covers) for unit in units)
            if is_dropped:
                recomputed_bytes += tensor.size_bytes
            elif any(actions.get(tag, Action.KEEP).offloads for tag in tensor.tags):
                moved_bytes += tensor.size_bytes
    return recomputed_bytes, moved_bytes


@pytest.mark.parametrize("path", PLANS, ids=[path.stem for path in PLANS])
def test_the_page_says_how_many_bytes_a_plan_frees(path):
    page = (ROOT / "examples" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{path.stem}`")]
    shown = [float(cell) for cell in row.split("|")[3:5]]
    assert shown == [round(size_bytes / 2**30, 2) for size_bytes in count_freed(OffloadPlan.load(path))]


def test_plans_free_more_and_more():
    freed = [sum(count_freed(OffloadPlan.load(path))) for path in PLANS]
    assert freed == sorted(set(freed))
