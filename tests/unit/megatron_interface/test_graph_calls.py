"""Tests the interface's CUDA graph calls: no offload during warm-up, and groups delayed until after a replay."""

import logging

import torch
from support.megatron_stub.training import LAYERS, check_same, list_offloaded_places, with_offload, without_offload

EXPERT_TAGS = ("expert_fc1", "moe_act")
ENGINE_LOGGER = "fgoffload.engine"


def get_expected() -> list[torch.Tensor]:
    with without_offload() as training:
        return training.step(microbatches=1)


def test_no_tensor_is_offloaded_between_disable_and_enable(caplog):
    with with_offload("core_attn", *EXPERT_TAGS) as training, caplog.at_level(logging.DEBUG, logger=ENGINE_LOGGER):
        interface = training.layers.off_interface
        interface.disable_offload()
        training.forward().square().sum().backward()
        assert list_offloaded_places(caplog) == []
        assert training.offload.engine.finish_step().tags == {}
        check_same(training.take_gradients(), get_expected())
        interface.enable_offload()
        check_same(training.step(microbatches=1), get_expected())
        assert len(list_offloaded_places(caplog)) == 3 * LAYERS


def test_a_group_open_while_offload_is_disabled_is_kept():
    with with_offload("attn_norm") as training:
        interface = training.layers.off_interface
        interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        leaf = torch.ones(64, requires_grad=True)
        manager = interface(offload=True, tensor=leaf, name="attn_norm")
        with manager as entered:
            output = entered.exp()
        interface.disable_offload()
        manager.group_offload(output)
        output.sum().backward()
        stats = training.offload.engine.finish_step().tags["attn_norm"]
    assert stats.saved_tensors == 1
    assert stats.d2h_bytes == 0
    assert torch.equal(leaf.grad, torch.ones(64).exp())


def test_delayed_groups_are_offloaded_after_the_replay_in_the_order_they_ended(caplog):
    with with_offload("core_attn", *EXPERT_TAGS) as training, caplog.at_level(logging.DEBUG, logger=ENGINE_LOGGER):
        interface = training.layers.off_interface
        for layer in training.models[0].layers:
            layer.experts.delays_offload = True
        interface.enter_replay()
        output = training.forward()
        # Attention does not delay its groups; only experts run outside graphs.
        assert list_offloaded_places(caplog) == [f"layers.{layer}.core_attn mb=0" for layer in range(LAYERS)]
        interface.exit_replay()
        interface.flush_delayed_groups()
        assert list_offloaded_places(caplog) == [f"layers.{layer}.{tag} mb=0" for layer in range(LAYERS) for tag in EXPERT_TAGS]
        interface.flush_delayed_groups()
        assert list_offloaded_places(caplog) == []
        output.square().sum().backward()
        check_same(training.take_gradients(), get_expected())
        training.forward()
        assert len(list_offloaded_places(caplog)) == 3 * LAYERS  # the replay is over


def test_flushing_between_layers_offloads_the_groups_of_earlier_layers(caplog):
    with with_offload(*EXPERT_TAGS) as training, caplog.at_level(logging.DEBUG, logger=ENGINE_LOGGER):
        interface = training.layers.off_interface
        offloaded = []
        for layer in training.models[0].layers:
            layer.experts.delays_offload = True

            def replay(module, args) -> None:  # the graph of attention and router is launched, then its experts run
                interface.flush_delayed_groups()
                offloaded.append(list_offloaded_places(caplog))

            layer.experts.register_forward_pre_hook(replay)
        interface.enter_replay()
        output = training.forward()
        interface.exit_replay()
        output.square().sum().backward()  # the last layer's groups were never flushed, and are kept
        check_same(training.take_gradients(), get_expected())
    assert offloaded == [[], *([f"layers.{layer}.{tag} mb=0" for tag in EXPERT_TAGS] for layer in range(LAYERS - 1))]


def test_delayed_groups_are_offloaded_immediately_outside_a_replay(caplog):
    with with_offload(*EXPERT_TAGS) as training, caplog.at_level(logging.DEBUG, logger=ENGINE_LOGGER):
        for layer in training.models[0].layers:
            layer.experts.delays_offload = True
        check_same(training.step(microbatches=1), get_expected())
        assert len(list_offloaded_places(caplog)) == 2 * LAYERS
