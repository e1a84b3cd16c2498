"""Modules that call the interface as the development branch's do: the same bits, exactly the bytes, the order of the calls."""

import gc
import logging
import re
import weakref

import pytest
import torch
from support.megatron_stub import installed, make_development_interface
from support.megatron_stub.training import (
    ALL_TAGS,
    BATCH,
    LAYERS,
    SEQUENCE,
    check_same,
    list_departures,
    make_config,
    with_offload,
    without_offload,
)
from support.sites import has_hooks

from fgoffload import ConfigError, IntegrationError, Tag, default_tags
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.imports import load_module

TOKENS = SEQUENCE * BATCH
HIDDEN_BYTES = TOKENS * 32 * 4
SCALE_BYTES = 2 * TOKENS * 4  # mean and reciprocal deviation, which a layer norm saves
BYTES = {
    "attn_norm": HIDDEN_BYTES + SCALE_BYTES,
    "qkv_linear": HIDDEN_BYTES,
    "core_attn": 4 * HIDDEN_BYTES,  # query, key and value, which are one storage, and tanh's output
    "attn_proj": HIDDEN_BYTES,
    "mlp_norm": HIDDEN_BYTES + SCALE_BYTES,
    "expert_fc1": HIDDEN_BYTES,
    "moe_act": TOKENS * 48 * 4,
}
"""What leaves of one layer in one microbatch."""
ORDER = ("qkv_linear", "core_attn", "attn_proj", "attn_norm", "expert_fc1", "moe_act", "mlp_norm")
"""In which groups of a layer end: a norm's after its residual was added."""


def get_expected(*, steps: int = 1, **options) -> list[torch.Tensor]:
    with without_offload(**options) as training:
        return [gradient for _ in range(steps) for gradient in training.step()]


@pytest.mark.parametrize("imports_first", [True, False], ids=["imported-before", "imported-after"])
@pytest.mark.parametrize(
    "tags",
    [*((tag,) for tag in ALL_TAGS if tag != "attn_proj"), ("core_attn", "attn_proj"), ALL_TAGS],
    ids=" ".join,
)
def test_gradients_are_the_same_to_the_bit_and_exactly_the_bytes_move(tags, imports_first):
    with with_offload(*tags, imports_first=imports_first) as training:
        found = [gradient for _ in range(2) for gradient in training.step()]
        moved = {tag: stats.d2h_bytes for tag, stats in training.offload.last_step.tags.items()}
    check_same(found, get_expected(steps=2))
    assert moved == {tag: BYTES[tag] * LAYERS * 2 for tag in tags}
    assert not has_hooks()


def test_groups_leave_in_the_order_in_which_call_sites_end_them(caplog):
    with with_offload(*ALL_TAGS) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        training.step()
        departures = list_departures(caplog)
    assert departures == [
        f"layers.{layer}.{tag} mb={microbatch}" for microbatch in range(2) for layer in range(LAYERS) for tag in ORDER
    ]


def test_two_chunks_of_an_interleaved_pipeline_keep_their_microbatches_apart(caplog):
    def run(training) -> list[torch.Tensor]:
        # The first stage of two: both microbatches through the first chunk, then through the second, and back.
        outputs = [(chunk, training.forward(chunk, microbatch=i)) for chunk in (0, 1) for i in (0, 1)]
        for chunk, i in ((1, 0), (1, 1), (0, 0), (0, 1)):
            outputs[2 * chunk + i][1].square().sum().backward()
        training.layers.finish_schedule()
        return training.take_gradients()

    with without_offload(chunks=2) as training:
        expected = run(training)
    with with_offload(*ALL_TAGS, chunks=2) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        check_same(run(training), expected)
        departures = list_departures(caplog)
        stats = training.offload.last_step.tags
    assert departures[:: len(ORDER) * LAYERS] == [
        "layers.0.qkv_linear mb=0",
        "layers.0.qkv_linear mb=1",
        "layers.3.qkv_linear mb=0 chunk=1",
        "layers.3.qkv_linear mb=1 chunk=1",
    ]
    assert {tag: numbers.d2h_bytes for tag, numbers in stats.items()} == {tag: 4 * LAYERS * BYTES[tag] for tag in ALL_TAGS}
    assert all(numbers.h2d_bytes > 0 for numbers in stats.values())


def test_an_evaluation_moves_nothing_and_is_no_step():
    with with_offload(*ALL_TAGS) as training:
        with torch.no_grad():
            training.forward()
        training.layers.finish_schedule()  # from 0.18 on schedules call it after an evaluation
        assert training.offload.last_step is None
        found = training.step()
        assert training.offload.last_step.tags["core_attn"].groups == 2 * LAYERS
        with torch.no_grad():
            training.forward()
        training.layers.finish_schedule()
        assert training.offload.last_step.tags["core_attn"].groups == 2 * LAYERS  # of the step, still
    check_same(found, get_expected())


def test_a_forward_without_gradients_within_a_step_makes_it_no_evaluation():
    with with_offload("core_attn") as training:
        with torch.no_grad():
            training.forward()  # a teacher's, say
        training.step()
        assert training.offload.last_step.tags["core_attn"].groups == 2 * LAYERS


def test_a_model_that_announces_no_microbatch_has_steps_too():
    with with_offload("core_attn") as training:
        hidden = torch.randn(SEQUENCE, BATCH, 32, generator=torch.Generator().manual_seed(1))
        for layer in training.models[0].layers:
            hidden = layer(hidden)
        hidden.square().sum().backward()
        training.layers.finish_schedule()
        assert training.offload.last_step.tags["core_attn"].d2h_bytes == LAYERS * BYTES["core_attn"]


def test_a_step_that_saved_nothing_is_told_even_after_an_evaluation():
    tags = default_tags().with_tag(Tag(name="nowhere", saves="nothing"))
    with with_offload("core_attn", config=make_config("core_attn", "nowhere", tags=tags)) as training:
        with torch.no_grad():
            training.forward()
        training.layers.finish_schedule()
        with pytest.raises(IntegrationError, match="'nowhere' has no site in this model on any rank"):
            training.step()


def test_a_site_that_a_checkpoint_runs_in_place_of_has_no_group():
    # Core attention under recompute: its object is made, and never entered or ended.
    tags = ("qkv_linear", "core_attn", "attn_proj")
    with with_offload(*tags, recomputes_core=True) as training:
        with pytest.raises(IntegrationError, match="'core_attn' has no site"):
            training.step()
        found = training.take_gradients()
        groups = {tag: stats.groups for tag, stats in training.offload.last_step.tags.items()}
    check_same(found, get_expected(recomputes_core=True))
    assert groups == {"qkv_linear": 2 * LAYERS, "attn_proj": 2 * LAYERS}


def test_the_fused_experts_are_one_group():
    tags = default_tags()
    if "fused_group_mlp" not in tags:
        tags = tags.with_tag(Tag(name="fused_group_mlp", saves="all that the fused experts keep"))
    with with_offload("fused_group_mlp", config=make_config("fused_group_mlp", tags=tags)) as training:
        found = training.step()
        stats = training.offload.last_step.tags["fused_group_mlp"]
    check_same(found, get_expected())
    assert stats.groups == 2 * LAYERS
    assert stats.d2h_bytes == 2 * LAYERS * (HIDDEN_BYTES + 2 * TOKENS * 48 * 4)


@pytest.mark.parametrize("recomputes_qkv", [False, True], ids=["saved", "run-again"])
def test_a_gated_delta_product_is_one_group_that_ends_behind_its_kernel(recomputes_qkv, caplog):
    options = {"kind": "DeltaLayer", "recomputes_qkv": recomputes_qkv}
    with with_offload("gdp_qkv", **options) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        found = [gradient for _ in range(2) for gradient in training.step()]
        departures = list_departures(caplog)
        stats = training.offload.last_step.tags
        gate, projected, behind = training.layers.PROJECTED
    check_same(found, get_expected(steps=2, **options))
    assert list(stats) == ["gdp_qkv"]
    assert departures == 2 * [f"layers.{layer}.gdp_qkv mb={mb}" for mb in range(2) for layer in range(LAYERS)]
    # The convolution's input lies between gates and other numbers, of which only those behind the last token stay. Normed
    # query and key are apart; run again, they are not saved. The kernel's value and gate are outside.
    leaving = 4 * (TOKENS * (gate + projected + behind) - behind) + (0 if recomputes_qkv else 2 * HIDDEN_BYTES)
    assert stats["gdp_qkv"].d2h_bytes == stats["gdp_qkv"].h2d_bytes == 2 * LAYERS * leaving
    assert stats["gdp_qkv"].groups == 2 * LAYERS
    assert not has_hooks()


def test_a_layer_of_gated_delta_products_without_forward_is_named_and_nothing_is_replaced(monkeypatch):
    module = load_module("megatron.core.ssm.mamba_layer")
    monkeypatch.setattr(module, "MambaLayer", type("MambaLayer", (), {}))
    interface = make_development_interface()
    before = dict(vars(interface))
    with (
        installed(interface),
        pytest.raises(IntegrationError, match=r"^megatron\.core\.ssm\.mamba_layer\.MambaLayer\.forward "),
    ):
        megatron.apply(make_config("gdp_qkv"))
    assert dict(vars(interface)) == before


@pytest.mark.parametrize(
    "path", ["tensor_parallel.random:CheckpointWithoutOutput.checkpoint", "tensor_parallel.random:CheckpointWithoutOutput"]
)
def test_a_missing_checkpoint_of_what_a_gated_delta_product_runs_again_is_named(path, monkeypatch):
    module_name, _, symbol = f"megatron.core.{path}".partition(":")
    owner, _, method = symbol.partition(".")
    module = load_module(module_name)
    monkeypatch.setattr(module, owner, type(owner, (), {})) if method else monkeypatch.delattr(module, owner)
    with installed(make_development_interface()), pytest.raises(IntegrationError, match=re.escape(f"{module_name}.{symbol} ")):
        megatron.apply(make_config("gdp_qkv"))


def test_an_object_that_is_kept_until_its_group_leaves_does_not_keep_its_input():
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


def test_a_site_that_is_off_has_no_group_though_its_tag_is_selected():
    with with_offload("core_attn") as training:
        training.models[0].eval()  # with gradients: core attention is off then, by its own flag
        training.forward().square().sum().backward()
        assert training.offload.engine.finish_step().tags == {}


def test_each_object_ends_the_group_that_it_began(caplog):
    # As two microbatches that run in turns would, each with the norm of one layer open.
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
        assert list_departures(caplog) == ["layers.0.mlp_norm mb=0", "layers.1.mlp_norm mb=0"]


def test_the_first_site_of_a_microbatch_marks_its_input_and_the_others_need_not():
    with with_offload("attn_norm", "mlp_norm") as training:
        interface = training.layers.off_interface
        interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        hidden = torch.ones(64, requires_grad=True) * 2
        marks = []
        for name in ("attn_norm", "mlp_norm"):
            manager = interface(offload=True, tensor=hidden, name=name)
            with manager as hidden:
                output = hidden.exp()
            marks.append(len(hidden._backward_hooks or ()))
            hidden = manager.group_offload(output)
    assert marks == [1, 0]


def test_what_group_offload_is_given_comes_back_as_it_was():
    with with_offload("qkv_linear") as training:
        interface = training.layers.off_interface
        for is_on in (True, False):
            given = [torch.ones(2), torch.ones(3)]
            manager = interface(is_on, torch.ones(1), "qkv_linear")
            assert manager.group_offload(given, forced_released_tensors=[given[0]]) is given
            assert given[0].untyped_storage().nbytes() == 8  # released by who holds it, never by force


def test_parameters_that_are_marked_and_tensors_that_transformer_engine_has_marked_stay():
    with with_offload("attn_norm", "mlp_norm") as training:
        interface = training.layers.off_interface
        interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        interface.mark_not_offload(None)  # as for a bias that is not there
        marked, of_engine, free = (torch.full((64,), 2.0) for _ in range(3))
        interface.mark_not_offload(marked)
        of_engine._TE_do_not_offload = True
        leaf = torch.ones(64, requires_grad=True)
        manager = interface(offload=True, tensor=leaf, name="attn_norm")
        with manager as entered:
            output = (entered * marked * of_engine * free).sum()
        manager.group_offload(output)
        stats = training.offload.engine.finish_step().tags["attn_norm"]
        kept = {str(reason): size_bytes for reason, size_bytes in stats.kept_bytes.items()}
        output.backward()
    assert torch.equal(leaf.grad, torch.full((64,), 8.0))
    assert stats.d2h_bytes == 64 * 4
    assert sorted(kept.values()) == [64 * 4, 64 * 4]


def test_settings_of_megatrons_config_that_count_for_nothing_are_named_once(caplog):
    with with_offload("core_attn") as training, caplog.at_level(logging.WARNING):
        training.models[0].settings["activation_offload_fraction"] = 0.5
        training.step()
        training.step()
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("fgoffload")]
    assert len(warnings) == 1
    assert "activation_offload_fraction=0.5 of Megatron's config has no effect: offload is applied with 1.0." in warnings[0]


def test_the_offloads_in_flight_of_megatrons_config_bound_ours():
    with with_offload("core_attn") as training:
        training.models[0].settings["max_inflight_offloads"] = 2
        training.step()
        assert training.offload.engine.most_in_flight == 2
        training.models[0].settings["max_inflight_offloads"] = -1
        with pytest.raises(ConfigError, match="fine_grained_offloading_max_inflight_offloads -1 is below 0"):
            training.step()
