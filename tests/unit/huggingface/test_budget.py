"""Tests that a memory budget with experts, LoRA, torch.compile or autocast is bitwise identical."""

import pytest
import torch
from support.huggingface import make_llama
from support.huggingface_models import PEFT, make_inputs, make_moe, make_peft
from support.models import ALL, check_equal, copy_gradients

import fgoffload
from fgoffload.integrations.transformers import OffloadCallback
from fgoffload.plan import Action

# PEFT and dynamo log warnings of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_model(kind):
    if kind == "experts":
        return make_moe("Qwen3-MoE", "grouped_mm")
    model = make_llama(use_cache=False)
    for layer in model.model.layers if kind == "compile" else ():
        layer.mlp.compile(backend="eager")
    return make_peft(model, *PEFT["LoRA"]) if kind == "lora" else model


def train(kind, memory):
    model = make_model(kind).train()
    model.config.use_cache = False
    handle = None if memory is None else fgoffload.offload(model, memory=memory, config=ALL)
    torch.manual_seed(1)
    found = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = model(**make_inputs()).loss
        loss.backward()
        found += [loss.detach(), *copy_gradients(model)]
    return found, handle


@pytest.mark.parametrize("kind", ["experts", "lora", "compile", "autocast"])
def test_a_tight_budget_is_bitwise_identical(kind):
    expected, _ = train(kind, None)
    found, large_budget = train(kind, "1GiB")
    check_equal(expected, found)
    found, handle = train(kind, int(0.9 * large_budget.planned.peak_bytes))
    check_equal(expected, found)
    assert {Action.OFFLOAD, Action.RECOMPUTE} & set(handle.planned.plan.actions.values())


@pytest.mark.parametrize(
    ("switch", "message"), [("cache", "DynamicCache.*use_cache = False"), ("checkpoints", "checkpointing_disable")]
)
def test_layers_that_cannot_be_measured_raise_an_error_with_the_setting_to_change(switch, message):
    model = make_llama(use_cache=switch == "cache").train()
    if switch == "checkpoints":
        model.gradient_checkpointing_enable()
    fgoffload.offload(model, memory="1GiB", config=ALL)
    with pytest.raises(fgoffload.ConfigError, match=message):
        model(**make_inputs()).loss.backward() or model(**make_inputs())


def test_repeating_offload_returns_the_same_handle_and_sizes_need_units():
    model = make_llama(use_cache=False)
    assert fgoffload.offload(model, memory="1GiB") is fgoffload.offload(model, memory="1GiB")
    for wrong in ("60", "sixty"):
        with pytest.raises(fgoffload.ConfigError, match=r"has no unit|is not a size"):
            OffloadCallback(memory=wrong)
    with pytest.raises(fgoffload.ConfigError, match=r"'60GiB' is a size.*OffloadCallback\(memory='60GiB'\)"):
        OffloadCallback("60GiB")
    OffloadCallback("0.*")  # a pattern may start with a number
    for wrong in ({"modules": 3}, {"modules": [3]}, {"config": {}}, {"modules": ["*"], "memory": "1GiB"}):
        with pytest.raises(fgoffload.ConfigError, match=r"modules|pattern|config"):
            OffloadCallback(**wrong)
    for arguments, message in (({}, "no memory budget, so it has no plan.*saved_gib"), ({"memory": "1GiB"}, "no plan yet")):
        with pytest.raises(fgoffload.ConfigError, match=message):
            fgoffload.explain(OffloadCallback(**arguments))
    with pytest.raises(fgoffload.ConfigError, match="matches one character"):
        fgoffload.offload(make_llama(), "model.layers.[10-15]")
