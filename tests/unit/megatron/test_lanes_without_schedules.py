"""Tests that each forward has its own lane in a loop without Megatron's schedules."""

import logging

import pytest
import torch
from support.megatron_stub.training import list_offloaded_places
from support.trainings import make_config

from fgoffload.environment import keep_environment
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.parallel import ATTENTION_BACKENDS

SEQUENCE, BATCH, LAYERS, FORWARDS = 32, 2, 2, 3


def build(kind):
    config_class = load_module("megatron.core.transformer.transformer_config").TransformerConfig
    config = config_class(num_layers=LAYERS, hidden_size=32, num_attention_heads=4, pipeline_dtype=torch.float32)
    sizes = {"vocab_size": 64, "max_sequence_length": SEQUENCE}
    if kind == "BERT":
        spec = load_module("megatron.core.models.bert.bert_layer_specs").bert_layer_local_spec
        return load_module("megatron.core.models.bert.bert_model").BertModel(config, 0, spec, **sizes)
    specs = load_module("megatron.core.models.T5.t5_spec")
    encoder, decoder = specs.get_t5_encoder_with_local_block_spec(LAYERS), specs.get_t5_decoder_with_local_block_spec(LAYERS)
    return load_module("megatron.core.models.T5.t5_model").T5Model(config, config, encoder, decoder, **sizes)


def forward(kind, model):
    tokens = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 64
    if kind == "BERT":
        return model(tokens, torch.ones(BATCH, SEQUENCE, dtype=torch.int64), lm_labels=tokens)[0]
    mask = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    return model(tokens, tokens, mask, mask, mask, lm_labels=tokens)


@pytest.mark.usefixtures("parallel")
@pytest.mark.parametrize("kind", ["BERT", "T5"])
def test_each_forward_is_its_own_microbatch(kind, caplog):
    offload = megatron.apply(make_config("attn_norm"))
    try:
        with keep_environment(ATTENTION_BACKENDS), apply_cpu_support(), ignore_expected_warnings():
            model = build(kind)
            with caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
                for _ in range(FORWARDS):
                    forward(kind, model).sum().backward()
            departures = list_offloaded_places(caplog)
            offload.finish_step()
    finally:
        offload.remove()
    microbatches = [name.partition(" ")[2] for name in departures]
    each = len(departures) // FORWARDS
    assert each >= LAYERS
    assert microbatches == [f"mb={number}" for number in range(FORWARDS) for _ in range(each)]
    assert offload.last_step.tags["attn_norm"].groups == len(departures)
