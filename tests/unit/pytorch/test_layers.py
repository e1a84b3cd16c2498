"""Tests how a model's layers are found without patterns."""

import pytest
import torch.distributed as dist
from support.models import Net, make_net
from torch import nn

from fgoffload import ConfigError
from fgoffload.integrations.pytorch.layers import find_layers

pytestmark = pytest.mark.quick


class TokenEmbeddings(nn.Module):
    """An embedding with several parts."""


class NoSplitNet(Net):
    """Lists modules that must not be split, like models of transformers."""

    _no_split_modules = ("Block", "TokenEmbeddings", "GELU")

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.embeddings = TokenEmbeddings()


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def list_names(model):
    return [site.name for site in find_layers(model)]


def test_layers_are_the_outermost_no_split_modules_without_embeddings():
    assert list_names(NoSplitNet()) == ["layers.0", "layers.1"]  # not the activation inside a layer


def test_layers_of_a_derived_class_are_found():
    model = NoSplitNet()
    model.layers[1].__class__ = type("FSDPBlock", (type(model.layers[1]),), {})
    assert list_names(model) == ["layers.0", "layers.1"]


@pytest.mark.usefixtures("_one_rank")
def test_layers_of_a_model_wrapped_in_ddp_are_found():
    assert list_names(nn.parallel.DistributedDataParallel(NoSplitNet())) == ["layers.0", "layers.1"]


def test_a_model_without_layers_is_refused_with_a_fix():
    with pytest.raises(ConfigError, match=r"no layers found in Net: .* `_no_split_modules` \(none\) .* Select modules"):
        find_layers(make_net())
