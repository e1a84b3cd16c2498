"""Tests that searching module outputs for a tensor never breaks a forward or leaves hooks behind."""

import collections
import dataclasses

import pytest
import torch
from support.models import ALL
from support.sites import has_hooks
from torch import nn

import fgoffload
from fgoffload.integrations.pytorch.outputs import find_tensor

pytestmark = pytest.mark.quick

MARKED = torch.ones(2, requires_grad=True)
PLAIN = torch.zeros(2)


@dataclasses.dataclass
class Record:
    first: object
    second: object = None

    def __getattribute__(self, name: str) -> object:
        if name in ("first", "second"):
            raise KeyError(name)
        return super().__getattribute__(name)


@dataclasses.dataclass(slots=True)
class Slotted:
    first: object
    second: object = dataclasses.field(init=False)


class LazyMapping(collections.UserDict):
    def values(self):
        raise KeyError("not computed yet")


def make_cycle() -> dict:
    cycle: dict = {"numbers": [1, 2.0, None]}
    cycle["self"] = [cycle]
    cycle["y"] = MARKED
    return cycle


VALUES = {
    "a tensor": MARKED,
    "a tuple": (PLAIN, MARKED),
    "a list of dicts": [{"a": PLAIN}, {"b": MARKED}],
    "an ordered dict": collections.OrderedDict(a=PLAIN, b=MARKED),
    "a dataclass whose attributes raise": Record(PLAIN, MARKED),
    "a dataclass with slots, one of them empty": Slotted(MARKED),
    "a cycle": make_cycle(),
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_first_tensor_with_a_gradient_is_found_in_plain_containers(kind):
    assert find_tensor(VALUES[kind]) is MARKED


@pytest.mark.parametrize("value", [LazyMapping(a=MARKED), "text", None, Record, [1, 2], Slotted(PLAIN)])
def test_other_values_return_no_tensor_and_do_not_raise(value):
    assert find_tensor(value) is None


def test_deep_nesting_ends_the_search_without_an_error():
    nest: list = [MARKED]
    for _ in range(100_000):
        nest = [nest]
    assert find_tensor(nest) is None
    while isinstance(nest[0], list):  # otherwise Python frees it recursively
        nest = nest[0]


class WrapOutput(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, hidden: torch.Tensor) -> object:
        self.y = hidden.sin()
        return self.wrap(self.y)


def wrap_in_cycle(y: torch.Tensor) -> dict:
    output = {"y": y}
    output["self"] = output
    return output


class Model(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.part = WrapOutput(wrap)

    def forward(self, hidden: torch.Tensor) -> object:
        self.part(hidden * 2)
        return self.part.wrap(self.part.y.sum())


@pytest.mark.parametrize("wrap", [wrap_in_cycle, lambda y: LazyMapping(y=y)], ids=["cycle", "lazy mapping"])
def test_a_model_with_cyclic_or_lazy_outputs_is_bitwise_identical_and_leaves_no_hooks(wrap):
    model, x = Model(wrap), torch.randn(3, requires_grad=True)
    model(x)
    expected = torch.autograd.grad(model.part.y.sum(), x)
    with fgoffload.offload(model, ["part"], ALL) as handle:
        model(x)
        assert not has_hooks()
        assert torch.equal(torch.autograd.grad(model.part.y.sum(), x)[0], expected[0])
        assert handle.stats().d2h_bytes == 12
