"""Tests modules that call the interface like the development branch: bitwise identical, exact bytes, order of calls."""

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.megatron_stub.training import (
    ALL_TAGS,
    BATCH,
    LAYERS,
    SEQUENCE,
    check_same,
    list_offloaded_places,
    with_offload,
    without_offload,
)
from support.sites import has_hooks

from fgoffload import ConfigError, IntegrationError, OffloadConfig
from fgoffload.integrations.megatron.adapter import model_config
from fgoffload.integrations.megatron.patching.imports import load_module

TOKENS = SEQUENCE * BATCH
HIDDEN_BYTES = TOKENS * 32 * 4
SCALE_BYTES = 2 * TOKENS * 4  # mean and reciprocal deviation, which a layer norm saves
BYTES = {
    "attn_norm": HIDDEN_BYTES + SCALE_BYTES,
    "qkv_linear": HIDDEN_BYTES,
    "core_attn": 4 * HIDDEN_BYTES,  # query, key and value in one storage, and tanh's output
    "attn_proj": HIDDEN_BYTES,
    "mlp_norm": HIDDEN_BYTES + SCALE_BYTES,
    "expert_fc1": HIDDEN_BYTES,
    "moe_act": TOKENS * 48 * 4,
}
"""Offloaded bytes of one layer in one microbatch."""


def get_expected(*, steps: int = 1, **options) -> list[torch.Tensor]:
    with without_offload(**options) as training:
        return [gradient for _ in range(steps) for gradient in training.step()]


@pytest.mark.parametrize("imports_first", [True, False], ids=["imported-before", "imported-after"])
@pytest.mark.parametrize(
    "tags", [*((tag,) for tag in ALL_TAGS if tag != "attn_proj"), ("core_attn", "attn_proj"), ALL_TAGS], ids=" ".join
)
def test_gradients_are_bitwise_identical_and_exact_bytes_are_offloaded(tags, imports_first):
    with with_offload(*tags, imports_first=imports_first) as training:
        found = [gradient for _ in range(2) for gradient in training.step()]
        offloaded = {tag: stats.d2h_bytes for tag, stats in training.offload.last_step.tags.items()}
    check_same(found, get_expected(steps=2))
    assert offloaded == {tag: BYTES[tag] * LAYERS * 2 for tag in tags}
    assert not has_hooks()


def test_a_site_replaced_by_a_checkpoint_has_no_group():
    # With core attention recomputed, its context manager is created, but never entered or ended.
    tags = ("qkv_linear", "core_attn", "attn_proj")
    with with_offload(*tags, recomputes_core=True) as training:
        with pytest.raises(IntegrationError, match="'core_attn' has no site"):
            training.step()
        found = training.take_gradients()
        groups = {tag: stats.groups for tag, stats in training.offload.last_step.tags.items()}
    check_same(found, get_expected(recomputes_core=True))
    assert groups == {"qkv_linear": 2 * LAYERS, "attn_proj": 2 * LAYERS}


@pytest.mark.parametrize("recomputes_qkv", [False, True], ids=["saved", "recomputed"])
def test_a_gated_delta_product_is_one_group_that_ends_after_its_kernel(recomputes_qkv, caplog):
    options = {"kind": "DeltaLayer", "recomputes_qkv": recomputes_qkv}
    with with_offload("gdp_qkv", **options) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        found = [gradient for _ in range(2) for gradient in training.step()]
        departures = list_offloaded_places(caplog)
        stats = training.offload.last_step.tags
        gate, projected, after = training.layers.PROJECTED
    check_same(found, get_expected(steps=2, **options))
    assert list(stats) == ["gdp_qkv"]
    assert departures == 2 * [f"layers.{layer}.gdp_qkv mb={mb}" for mb in range(2) for layer in range(LAYERS)]
    # The convolution's input lies between gates and other projections: all but those after the last token are offloaded.
    # Normed query and key are separate, and not saved if recomputed. The kernel's value and gate are outside.
    offloaded_bytes = 4 * (TOKENS * (gate + projected + after) - after) + (0 if recomputes_qkv else 2 * HIDDEN_BYTES)
    assert stats["gdp_qkv"].d2h_bytes == stats["gdp_qkv"].h2d_bytes == 2 * LAYERS * offloaded_bytes
    assert stats["gdp_qkv"].groups == 2 * LAYERS
    assert not has_hooks()


def test_the_context_manager_keeps_no_reference_to_its_input():
    with with_offload("attn_norm") as training:
        training.layers.off_interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        hidden = torch.ones(64, requires_grad=True) * 2
        manager = training.layers.off_interface(offload=True, tensor=hidden, name="attn_norm")
        with manager as entered:
            doubled = entered * 2
        alive = weakref.ref(hidden)
        del hidden, entered
        gc.collect()
        assert alive() is None
        assert manager.group_offload(doubled) is doubled


def test_a_disabled_site_has_no_group_even_if_its_tag_is_selected():
    with with_offload("core_attn") as training:
        training.models[0].eval()  # with gradients, but core attention disables its site
        training.forward().square().sum().backward()
        assert training.offload.engine.finish_step().tags == {}


def test_each_context_manager_ends_its_own_group(caplog):
    # As with two interleaved microbatches, each inside the norm of one layer.
    with with_offload("mlp_norm") as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        interface = training.layers.off_interface
        interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        hidden = torch.ones(64, requires_grad=True) * 2
        managers = []
        for layer in (0, 1):
            training.offload.enter_layer(layer)
            managers.append(interface(offload=True, tensor=hidden, name="mlp_norm"))
            with managers[-1] as hidden:
                hidden = hidden.exp()
        for manager in managers:
            manager.group_offload(hidden)
        assert list_offloaded_places(caplog) == ["layers.0.mlp_norm mb=0", "layers.1.mlp_norm mb=0"]


def test_group_offload_returns_its_arguments_unchanged():
    with with_offload("qkv_linear") as training:
        interface = training.layers.off_interface
        for is_on in (True, False):
            given = [torch.ones(2), torch.ones(3)]
            manager = interface(is_on, torch.ones(1), "qkv_linear")
            assert manager.group_offload(given, forced_released_tensors=[given[0]]) is given
            assert given[0].untyped_storage().nbytes() == 8  # its owner releases it, not the interface


def test_tensors_marked_by_megatron_or_transformer_engine_are_not_offloaded():
    with with_offload("attn_norm", "mlp_norm") as training:
        interface = training.layers.off_interface
        interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        interface.mark_not_offload(None)  # as for a missing bias
        marked, marked_by_te, free = (torch.full((64,), 2.0) for _ in range(3))
        interface.mark_not_offload(marked)
        marked_by_te._TE_do_not_offload = True
        leaf = torch.ones(64, requires_grad=True)
        manager = interface(offload=True, tensor=leaf, name="attn_norm")
        with manager as entered:
            output = (entered * marked * marked_by_te * free).sum()
        manager.group_offload(output)
        stats = training.offload.engine.finish_step().tags["attn_norm"]
        kept = {str(reason): size_bytes for reason, size_bytes in stats.kept_bytes.items()}
        output.backward()
    assert torch.equal(leaf.grad, torch.full((64,), 8.0))
    assert stats.d2h_bytes == 64 * 4
    assert sorted(kept.values()) == [64 * 4, 64 * 4]


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
def test_ignored_settings_of_megatrons_config_are_reported(caplog):
    with with_offload("core_attn"), caplog.at_level(logging.WARNING):
        make = load_module("megatron.core.transformer.transformer_config").TransformerConfig
        sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "min_offloaded_tensor_size": 7}
        make(**sizes, fine_grained_activation_offloading=True, offload_modules=["core_attn"])
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("fgoffload")]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "min_offloaded_tensor_size=7 in a TransformerConfig has no effect, because offload was applied with "
    )


def test_an_empty_plan_is_described_as_no_tags(caplog):
    ours, theirs = OffloadConfig(offload_modules=("core_attn",)), SimpleNamespace(offload_modules=["core_attn"])
    model_config._warn_of_ignored(theirs, ours, selected=())
    assert caplog.messages[0].endswith("has no effect, because offload was applied with no tags.")


def test_megatrons_limit_of_offloads_in_flight_is_respected():
    with with_offload("core_attn") as training:
        training.models[0].settings["max_inflight_offloads"] = 2
        training.step()
        assert training.offload.engine.execution.most_in_flight == 2
        training.models[0].settings["max_inflight_offloads"] = -1
        with pytest.raises(ConfigError, match="fine_grained_offloading_max_inflight_offloads -1 is negative"):
            training.step()
