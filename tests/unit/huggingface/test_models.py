"""Tests that tiny random models are bitwise identical with offload, for each row of `docs/how_to/huggingface.md`."""

import pytest
import torch
from support.huggingface import ALL, LAYERS, OLD_NAMES, make_llama, needs
from support.huggingface_models import (
    EXPERTS,
    PEFT,
    make_inputs,
    make_moe,
    make_peft,
    make_quantized,
    make_vision,
    make_vision_inputs,
)
from support.models import check_equal

from fgoffload.integrations.pytorch.layers import find_layers
from fgoffload.integrations.pytorch.model import offload_sites

pytestmark = [needs("transformers"), OLD_NAMES]


def compute(model, inputs):
    """Return the loss and all gradients, with the same dropout in each call."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def compare(model, inputs=None):
    """Check that offload of all layers is bitwise identical, and return the offloaded bytes by tag."""
    inputs = make_inputs() if inputs is None else inputs
    model.train()
    expected = compute(model, inputs)
    assert len(expected) > 1
    with offload_sites(model, find_layers(model), ALL) as handle:
        found = compute(model, inputs)
        offloaded_bytes = {tag: numbers.d2h_bytes for tag, numbers in handle.stats().tags.items()}
    check_equal(expected, found)
    return offloaded_bytes


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_mixture_of_experts_models_are_bitwise_identical(kind, experts):
    model = make_moe(kind, experts)
    assert model.config._experts_implementation == experts
    assert compare(model)["layers"] > 0


@needs("peft")
@pytest.mark.filterwarnings("ignore:Unsupported layer type", "ignore:`past_key_values` is deprecated")  # from PEFT
@pytest.mark.parametrize("kind", PEFT)
def test_peft_adapters_are_bitwise_identical(kind):
    model = make_peft(make_llama(), *PEFT[kind])
    names = {site.name for site in find_layers(model)}
    assert names == {f"model.layers.{layer}" for layer in range(LAYERS)}  # without PEFT's prefixes
    assert compare(model)["layers"] > 0


@needs("peft", "bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8], ids=["nf4", "int8"])
def test_lora_on_a_quantized_model_is_bitwise_identical(bits):
    model = make_quantized(bits)
    assert {parameter.dtype for parameter in model.parameters()} > {torch.uint8 if bits == 4 else torch.int8}
    assert compare(model)["layers"] > 0


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained tower", "frozen tower"])
@pytest.mark.parametrize("kind", ["Qwen2-VL", "Qwen3-VL"])
def test_vision_language_models_are_bitwise_identical(kind, is_frozen):
    offloaded_bytes = compare(make_vision(kind, is_frozen=is_frozen), make_vision_inputs())
    assert offloaded_bytes["layers"] > 0
    assert (offloaded_bytes["blocks"] > 0) is not is_frozen  # a frozen tower saves nothing
