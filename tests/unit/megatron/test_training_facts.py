"""Tests that a plan's `made_for` agrees with Megatron's config of the same flags."""

import enum
import types

import pytest
from support.scripts import BENCHMARKS

from fgoffload.integrations.megatron.adapter.model_config import read_facts
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_model_file
from fgoffload.plan import FP8_RECIPE, MICROBATCHES, TOKENS
from fgoffload.planner.training_facts import list_facts
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments

ARGUMENTS = BENCHMARKS.parents[1] / "arguments"


@pytest.mark.filterwarnings("ignore:Using a large number of experts")  # Megatron's, of GPT-OSS
@pytest.mark.parametrize("path", sorted(ARGUMENTS.glob("*.sh")), ids=lambda path: path.stem)
def test_training_facts_of_each_argument_file_match_its_config(path):
    flags = read_argument_file(path, variables={})
    # A config with fused permutation needs its kernels, and has the same facts.
    arguments = parse_arguments(flags, source=path.name, typed=("--no-moe-permute-fusion",))
    model, parallelism = read_model_file(path)
    facts = list_facts(model, parallelism)
    assert facts.pop(TOKENS) == arguments.seq_length * arguments.micro_batch_size
    facts.pop(MICROBATCHES, None)  # not part of the config
    found = read_facts(build_transformer_config(arguments, offload=None))
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize("recipe", ["blockwise", enum.Enum("Recipe", {"BLOCKWISE": "blockwise"}).BLOCKWISE])
def test_the_fp8_recipe_is_recorded_by_name_and_only_with_fp8(recipe):
    # A real config with this recipe needs Transformer Engine.
    for flags, expected in ((), "none"), (("--fp8-recipe", "blockwise"), "none"), (("--fp8-format", "e4m3"), "delayed"):
        assert list_facts(*read_model_file(ARGUMENTS / "w2_moe.sh", typed=flags))[FP8_RECIPE] == expected
    assert read_facts(types.SimpleNamespace(fp8="e4m3", fp8_recipe=recipe))[FP8_RECIPE] == "blockwise"
    assert read_facts(types.SimpleNamespace(fp8=None, fp8_recipe=recipe))[FP8_RECIPE] == "none"
