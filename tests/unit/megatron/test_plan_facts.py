"""What a plan says that it was made for is what Megatron's config says of the same flags: no training refuses its own plan."""

import dataclasses

import pytest
from support.scripts import BENCHMARKS

from fgoffload import OffloadPlan, PlanError
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments
from fgoffload.integrations.megatron.model_config import read_facts
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.plan import TOKENS
from fgoffload.planner import ModelShape, Parallelism, get_hardware, plan
from fgoffload.planner.plan_facts import list_facts
from fgoffload.units import GIB

ARGUMENTS = BENCHMARKS.parents[1] / "arguments"


@pytest.mark.filterwarnings("ignore:Using a large number of experts")  # Megatron's, of GPT-OSS
@pytest.mark.parametrize("path", sorted(ARGUMENTS.glob("*.sh")), ids=lambda path: path.stem)
def test_the_facts_of_each_argument_file_are_those_of_its_config(path):
    flags = read_argument_file(path, variables={})
    # Fused permutation has to be installed where a config is made, and changes no fact.
    arguments = parse_arguments(flags, source=path.name, typed=("--no-moe-permute-fusion",))
    model, parallelism = read_model_file(path)
    facts = list_facts(model, parallelism)
    assert facts.pop(TOKENS) == arguments.seq_length * arguments.micro_batch_size
    found = read_facts(build_transformer_config(arguments, offload=None))
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize(
    ("field", "value", "difference"),
    [
        ("topk", 4, "moe_router_topk 4, and this training has 2"),
        ("ffn_hidden_size", 8, "moe_ffn_hidden_size 8, and this training has 256"),
        ("shared_ffn_hidden_size", 8, "moe_shared_expert_intermediate_size 8, and this training has 0"),
    ],
)
def test_a_plan_for_other_experts_is_refused(field, value, difference):
    path = ARGUMENTS / "tiny_moe.sh"
    model, parallelism = read_model_file(path)
    experts = dataclasses.replace(model.experts, **{field: value})
    other = OffloadPlan(actions={}, made_for=list_facts(dataclasses.replace(model, experts=experts), parallelism))
    config = build_transformer_config(parse_arguments(read_argument_file(path, variables={}), source=path.name), offload=None)
    with pytest.raises(PlanError, match=rf"^The plan was made for {difference}\."):
        other.check_made_for(read_facts(config))


def test_a_plan_of_the_python_call_says_what_it_was_made_for():
    model = ModelShape(
        name="two layers",
        num_layers=2,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=32000,
        seq_length=512,
    )
    ranks = Parallelism()
    report = plan(model, ranks, get_hardware("h100"), budget_bytes=70 * GIB)
    assert report.solution.plan.made_for == list_facts(model, ranks)
    assert report.solution.plan.made_for["ffn_hidden_size"] == 4096
