"""Tests the modules that a glob matches, and the error if it matches none."""

import pytest
import torch
from support.models import make_net
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fgoffload
from fgoffload import ConfigError
from fgoffload.integrations.pytorch.patterns import find_sites

pytestmark = pytest.mark.quick


def list_found(model, patterns):
    return [(site.name, site.tag, site.layer) for site in find_sites(model, patterns)]


def make_tree() -> nn.Module:
    return nn.ModuleDict(
        {
            "embed": nn.Linear(2, 2),
            "layers": nn.ModuleList(
                nn.ModuleDict({"attn": nn.Linear(2, 2), "cross": nn.ModuleDict({"attn": nn.Linear(2, 2)})}) for _ in range(2)
            ),
        }
    )


def test_one_star_matches_within_one_part_of_a_name():
    assert list_found(make_tree(), {"layers.*.attn": "a"}) == [("layers.0.attn", "a", 0), ("layers.1.attn", "a", 1)]


def test_two_stars_match_any_number_of_parts():
    names = [name for name, _, _ in list_found(make_tree(), {"**.attn": "a"})]
    assert names == ["layers.0.attn", "layers.0.cross.attn", "layers.1.attn", "layers.1.cross.attn"]
    assert list_found(make_tree(), {"**.embed": "e"}) == [("embed", "e", 0)]  # including none


def test_the_default_tag_is_the_last_word_of_the_name():
    assert list_found(make_net(layers=1), ["layers.0.mlp", "layers.0.attn.1"]) == [
        ("layers.0.attn.1", "attn", 0),
        ("layers.0.mlp", "mlp", 0),
    ]


def test_a_module_with_a_numeric_name_is_tagged_by_its_class():
    assert list_found(nn.Sequential(nn.Linear(2, 2), nn.GELU()), "*") == [("0", "Linear", 0), ("1", "GELU", 1)]


def test_the_model_itself_and_module_lists_are_not_regions():
    assert "" not in [name for name, _, _ in list_found(make_tree(), "**")]
    with pytest.raises(ConfigError, match="pattern 'layers' matches none"):
        find_sites(make_tree(), "layers")


def test_a_module_with_two_names_is_one_region():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"one": shared, "other": shared})
    assert list_found(model, {"**": "linear"}) == [("one", "linear", 0)]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.atn", r"Did you mean 'layers\.\*\.attn'"),
        ("attn", r"Did you mean '\*\*\.attn'\?"),
        ("layer.*.mlp", r"Did you mean 'layers\.\*\.mlp'"),
        ("layers", r"Did you mean 'layers\.\*'\?"),  # a module list
        ("layer", r"Did you mean 'layers\.\*'"),
        ("blocks.3.self_attention", ""),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_the_nearest_match(pattern, hint):
    with pytest.raises(ConfigError, match=rf"matches none of the \d+ modules in Net that have a forward\. ?{hint}"):
        find_sites(make_net(), [pattern])


@pytest.mark.parametrize("tag", ["core attn", "", "3", 7, None])
def test_a_tag_that_is_not_one_word_is_refused(tag):
    with pytest.raises(ConfigError, match="is not an identifier"):
        fgoffload.offload(make_net(), {"layers.*.attn": tag})


def test_conflicting_tags_for_one_module_are_refused_with_both_patterns():
    with pytest.raises(
        ConfigError, match=r"'layers\.0\.attn' has two tags, 'a' from 'layers\.\*\.attn' and 'b' from 'layers\.0\.\*'"
    ):
        find_sites(make_net(), {"layers.*.attn": "a", "layers.0.*": "b"})


def test_wrapper_prefixes_are_ignored_and_the_wrapper_is_the_region():
    net = make_net(layers=2)
    net.layers[0].attn = torch.compile(net.layers[0].attn, backend="eager")
    found = find_sites(net, {"layers.*.attn": "attn"})
    assert [site.name for site in found] == ["layers.0.attn", "layers.1.attn"]
    assert found[0].module is net.layers[0].attn
    assert [site.name for site in find_sites(torch.compile(net, backend="eager"), ["layers.*.mlp"])] == [
        "layers.0.mlp",
        "layers.1.mlp",
    ]


class FakePeftModel(nn.Module):
    """A fake PEFT model, with the same attribute names."""

    peft_config = None

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model
        self.prompt_encoder = nn.Linear(2, 2)


class FakeTuner(nn.Module):
    """A fake PEFT tuner, which wraps the base model except in prompt tuning."""

    peft_config = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_the_peft_prefix_of_prompt_tuning_is_ignored():
    net = nn.ModuleDict({"model": make_net(layers=1)})
    assert list_found(FakePeftModel(net), "model.layers.*") == [("model.layers.0", "layers", 0)]


def test_peft_prefixes_are_ignored():
    model = FakePeftModel(FakeTuner(make_net(layers=1)))
    assert list_found(model, "layers.0.mlp") == [("layers.0.mlp", "mlp", 0)]
    assert list_found(model, "*") == [("prompt_encoder", "prompt_encoder", 0)]
    assert list_found(checkpoint_wrapper(model), "layers.*") == [("layers.0", "layers", 0)]
