"""Tests Megatron's recompute flags with offload of the remaining tags: bitwise identical to recompute without offload."""

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

# Dropout is on, as by default in Megatron: recompute has to draw the same masks.
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"

MODULES = ("layernorm", "core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")
"""All of `--recompute-modules`."""
NEEDS = {"mla_up_proj": LATENT, "moe_act": "--moe-grouped-gemm"}
"""Model flags that each module requires."""

EXCLUDED = [(module, tag.name) for tag in default_tags() for module in tag.excluded_by]


def make_flags(*modules):
    return " ".join([MIXED, SELECTIVE, *modules, *(flags for module, flags in NEEDS.items() if module in modules)])


@contextlib.contextmanager
def stand_ins(flags):
    """Temporarily replace the parts of the model of `flags` that need Transformer Engine."""
    with contextlib.ExitStack() as stack:
        if "--multi-latent-attention" in flags:
            stack.enter_context(reference_attention())
        if "--moe-grouped-gemm" in flags:
            stack.enter_context(grouped_experts())
            # Megatron requires the flag for `moe_act`, but the trainer rejects it with local layers.
            stack.enter_context(mock.patch.object(training, "check_supported"))
        yield


def list_allowed(*modules):
    """Return the tags of the model that can be offloaded with `modules` recomputed."""
    excluded = {tag for module, tag in EXCLUDED if module in modules}
    excluded |= {tag.name for tag in default_tags() if excluded.intersection(tag.requires)}
    return [tag for tag in MIXED_TAGS if tag not in excluded]


def find_idle_tags(flags, tags):
    """Train with and without offload of `tags`, compare bitwise, and return the tags that offloaded nothing."""
    with stand_ins(flags):
        expected, _ = train(flags)
        found, offloaded_bytes = train(flags, make_config(*tags))
    assert found == expected
    assert set(offloaded_bytes) == set(tags)
    return {tag for tag, size_bytes in offloaded_bytes.items() if size_bytes == 0}


@pytest.mark.parametrize("module", MODULES)
def test_selective_recompute_works_with_every_compatible_tag(module, caplog):
    idle = find_idle_tags(make_flags(module), list_allowed(module))
    # These linears save only the norms' output, which belongs to the recompute: a log message explains it.
    assert idle == ({"qkv_linear", "mlp_fc1"} if module == "layernorm" else set())
    assert caplog.text.count("its storage belongs to a recompute, which empties and refills it") == len(idle)


def test_selective_recompute_of_several_modules_works_with_every_compatible_tag():
    modules = ("layernorm", "core_attn", "mlp", "shared_experts")
    tags = list_allowed(*modules)
    assert tags == ["attn_norm", "qkv_linear", "mlp_norm", "router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"]
    assert find_idle_tags(make_flags(*modules), tags) == {"qkv_linear"}


@pytest.mark.parametrize(
    ("method", "tags"),
    [
        ("uniform --recompute-num-layers 1", ["layer_input"]),
        ("uniform --recompute-num-layers 2", ["layer_input"]),
        # Only the first layer, the dense one, is recomputed.
        ("block --recompute-num-layers 1", ["layer_input", *(tag for tag in MIXED_TAGS if tag not in MLP_TAGS)]),
    ],
)
def test_full_recompute_works_with_offloaded_layer_inputs(method, tags):
    assert find_idle_tags(f"{MIXED} {FULL} {method}", tags) == set()


@pytest.mark.parametrize(("module", "tag"), EXCLUDED)
def test_tags_of_recomputed_tensors_are_rejected_at_argument_parsing(module, tag):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(f"{MIXED} {SELECTIVE} {module} {OFFLOAD} {tag}".split(), source="test")
    assert (
        f"--offload-modules {tag!r} and --recompute-modules {module!r} are mutually exclusive: recomputed tensors are not "
        "saved, so nothing would be offloaded. Remove one of them."
    ) in str(caught.value)
