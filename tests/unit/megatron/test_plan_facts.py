"""What a plan says that it was made for is what Megatron's config says of the same flags: no training refuses its own plan."""

import dataclasses
import enum
import types

import pytest
from support.scripts import BENCHMARKS

from fgoffload import OffloadPlan, PlanError
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments
from fgoffload.integrations.megatron.model_config import read_facts
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.plan import FP8_RECIPE, MICROBATCHES, TOKENS
from fgoffload.planner.plan_facts import list_facts

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
    facts.pop(MICROBATCHES, None)  # of a step, of which the config does not know
    found = read_facts(build_transformer_config(arguments, offload=None))
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize("recipe", ["blockwise", enum.Enum("Recipe", {"BLOCKWISE": "blockwise"}).BLOCKWISE])
def test_the_recipe_of_fp8_is_a_fact_by_its_name_and_only_with_fp8(recipe):
    # A config of it needs Transformer Engine.
    for flags, expected in ((), "none"), (("--fp8-recipe", "blockwise"), "none"), (("--fp8-format", "e4m3"), "delayed"):
        assert list_facts(*read_model_file(ARGUMENTS / "w2_moe.sh", typed=flags))[FP8_RECIPE] == expected
    assert read_facts(types.SimpleNamespace(fp8="e4m3", fp8_recipe=recipe))[FP8_RECIPE] == "blockwise"
    assert read_facts(types.SimpleNamespace(fp8=None, fp8_recipe=recipe))[FP8_RECIPE] == "none"


def check(facts, path):
    """Check a plan that was made for `facts` against the training of `path`."""
    arguments = parse_arguments(read_argument_file(path, variables={}), source=path.name)
    OffloadPlan(actions={}, made_for=facts).check_made_for(read_facts(build_transformer_config(arguments, offload=None)))


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"normalization": "LayerNorm"}, "normalization LayerNorm, and this training has RMSNorm"),
        ({"is_gated": False}, "gated_linear_unit 0, and this training has 1"),
        ({"has_qk_norm": True}, "qk_layernorm 1, and this training has 0"),
        ({"topk": 4}, "moe_router_topk 4, and this training has 2"),
        ({"ffn_hidden_size": 8}, "moe_ffn_hidden_size 8, and this training has 256"),
        ({"shared_ffn_hidden_size": 8}, "moe_shared_expert_intermediate_size 8, and this training has 0"),
    ],
)
def test_a_plan_for_layers_that_save_something_else_is_refused(changed, difference):
    path = ARGUMENTS / "tiny_moe.sh"
    model, parallelism = read_model_file(path)
    experts = {name: value for name, value in changed.items() if name in ("topk", "ffn_hidden_size", "shared_ffn_hidden_size")}
    changed = {"experts": dataclasses.replace(model.experts, **experts)} if experts else changed
    check(list_facts(model, parallelism), path)
    with pytest.raises(PlanError, match=rf"^The plan was made for {difference}\."):
        check(list_facts(dataclasses.replace(model, **changed), parallelism), path)


def test_a_plan_for_ranks_that_share_the_sequence_is_refused_where_they_do_not():
    model, parallelism = read_model_file(ARGUMENTS / "llama3_8b.sh")
    made_for = list_facts(model, dataclasses.replace(parallelism, tensor_parallel_size=2, has_sequence_parallel=True))
    plan = OffloadPlan(actions={}, made_for={"sequence_parallel": made_for["sequence_parallel"]})
    plan.check_made_for(read_facts(types.SimpleNamespace(sequence_parallel=True, bf16=True)))
    with pytest.raises(PlanError, match=r"^The plan was made for sequence_parallel 1, and this training has 0\."):
        plan.check_made_for(read_facts(types.SimpleNamespace(sequence_parallel=False, bf16=True)))
