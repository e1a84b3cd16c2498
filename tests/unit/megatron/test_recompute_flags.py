"""Tests Megatron's recompute flags with offload of the remaining tags: the same bits as recompute without offload."""

import contextlib
from unittest import mock

import pytest
from support.attention import reference_attention
from support.grouped_experts import grouped_experts
from support.trainings import MIXED, MIXED_TAGS, MLP_TAGS, make_config, train

from fgoffload import ConfigError, default_tags
from fgoffload.trainer import trainer as training
from fgoffload.trainer.arguments import parse_arguments

pytestmark = pytest.mark.usefixtures("parallel")

# Dropout is on, as Megatron has it by default: what runs again has to draw the same masks.
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"

MODULES = ("layernorm", "core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")
"""All of `--recompute-modules`."""
NEEDS = {"mla_up_proj": LATENT, "moe_act": "--moe-grouped-gemm"}
"""Flags of models that have what the module is."""

REFUSED = [(module, tag.name) for tag in default_tags() for module in tag.excluded_by]


def make_flags(*modules):
    return " ".join([MIXED, SELECTIVE, *modules, *(flags for module, flags in NEEDS.items() if module in modules)])


@contextlib.contextmanager
def stand_ins(flags):
    """Give the model of `flags` what needs Transformer Engine otherwise, until the body ends."""
    with contextlib.ExitStack() as stack:
        if "--multi-latent-attention" in flags:
            stack.enter_context(reference_attention())
        if "--moe-grouped-gemm" in flags:
            stack.enter_context(grouped_experts())
            # Megatron wants the flag for `moe_act`, and the local layers are refused with it.
            stack.enter_context(mock.patch.object(training, "check_supported"))
        yield


def list_allowed(*modules):
    """Return the tags of the model that can be offloaded with `modules` recomputed."""
    refused = {tag for module, tag in REFUSED if module in modules}
    refused |= {tag.name for tag in default_tags() if refused.intersection(tag.requires)}
    return [tag for tag in MIXED_TAGS if tag not in refused]


def find_unmoved(flags, tags):
    """Train with and without offload of `tags`, compare every bit, and return the tags that moved nothing."""
    with stand_ins(flags):
        expected, _ = train(flags)
        found, moved = train(flags, make_config(*tags))
    assert found == expected
    assert set(moved) == set(tags)
    return {tag for tag, size_bytes in moved.items() if size_bytes == 0}


@pytest.mark.parametrize("module", MODULES)
def test_selective_recompute_of_a_module_and_all_tags_that_it_allows(module, caplog):
    unmoved = find_unmoved(make_flags(module), list_allowed(module))
    # The linears save the norms' output alone, and what is recomputed for them is not theirs to move: that is said.
    assert unmoved == ({"qkv_linear", "mlp_fc1"} if module == "layernorm" else set())
    assert caplog.text.count("its storage belongs to a recompute, which empties and refills it") == len(unmoved)


def test_all_modules_that_recompute_together_and_all_tags_that_they_allow():
    modules = ("layernorm", "core_attn", "mlp", "shared_experts")
    tags = list_allowed(*modules)
    assert tags == ["attn_norm", "qkv_linear", "mlp_norm", "router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"]
    assert find_unmoved(make_flags(*modules), tags) == {"qkv_linear"}


@pytest.mark.parametrize(
    ("method", "tags"),
    [
        ("uniform --recompute-num-layers 1", ["layer_input"]),
        ("uniform --recompute-num-layers 2", ["layer_input"]),
        # The first layer, the dense one, is recomputed, and the other one saves as always.
        ("block --recompute-num-layers 1", ["layer_input", *(tag for tag in MIXED_TAGS if tag not in MLP_TAGS)]),
    ],
)
def test_full_recompute_and_its_layers_inputs(method, tags):
    assert find_unmoved(f"{MIXED} {FULL} {method}", tags) == set()


@pytest.mark.parametrize(("module", "tag"), REFUSED)
def test_a_tag_whose_tensors_a_module_recomputes_is_refused_before_anything_is_built(module, tag):
    with pytest.raises(ConfigError) as refused:
        parse_arguments(f"{MIXED} {SELECTIVE} {module} {OFFLOAD} {tag}".split(), source="test")
    assert (
        f"--offload-modules {tag!r} and --recompute-modules {module!r} are mutually exclusive: recomputed tensors are not "
        "saved, so nothing would be offloaded. Remove one of them."
    ) in str(refused.value)
