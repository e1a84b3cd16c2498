"""Tests captured and replayed Megatron layers with offload outside and inside the graphs: bitwise identical."""

import contextlib
import gc
import logging

import pytest
import torch
from support.graphs import GraphDevice
from support.megatron_graphs import GRAPHS, GraphedTraining, without_cuda
from support.trainings import MOE, make_config, make_trainer
from support.versions import is_installed

from fgoffload import StateError
from fgoffload.engine import KeptReason
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module

pytestmark = [
    pytest.mark.usefixtures("parallel"),
    pytest.mark.skipif(not is_installed("0.19"), reason="needs the CUDA graphs of megatron-core 0.19"),
]

LAYERS, MICROBATCHES = 3, 2
FLAGS = MOE.replace("--moe-aux-loss-coeff 1e-2", "--moe-router-load-balancing-type none").replace(
    "--num-layers 2", f"--num-layers {LAYERS}"
)
OUTSIDE, INSIDE = ("expert_fc1", "moe_act"), ("qkv_linear", "core_attn", "attn_proj")


@contextlib.contextmanager
def graphed(monkeypatch, modules, offload, *, flags=FLAGS):
    device = None if offload is None else GraphDevice()
    monkeypatch.setattr("fgoffload.engine.find_device", lambda kind: device)
    with without_cuda(monkeypatch), make_trainer(flags, offload) as trainer:
        training = GraphedTraining(trainer, modules, device)
        training.run_first_step()
        training.capture()
        yield training
    gc.collect()


def train(monkeypatch, modules, offload=None, *, steps=2):
    with graphed(monkeypatch, modules, offload) as training:
        results = []
        for _ in range(steps):
            training.pool.poison()
            step = training.trainer.run_step()
            results.append((step.losses, step.gradient_digests))
        tags = training.trainer.integration.last_step.tags if offload else {}
    return results, tags


def list_offloaded(caplog):
    messages = [record.getMessage() for record in caplog.records]
    return [message.partition(":")[0].removeprefix("offload ") for message in messages if message.startswith("offload ")]


@pytest.mark.parametrize(
    ("modules", "tags"),
    [
        (["attn"], OUTSIDE),
        (["attn", "moe_router"], OUTSIDE),
        (["attn"], INSIDE),
        (["attn", "moe_router"], (*INSIDE, *OUTSIDE)),
        (["moe_router"], (*INSIDE, *OUTSIDE)),
    ],
)
@pytest.mark.parametrize("delays", [False, True], ids=["immediate", "delayed"])
def test_graphed_training_with_offload_is_bitwise_identical_to_without(monkeypatch, modules, tags, delays):
    expected, _ = train(monkeypatch, modules)
    found, stats = train(monkeypatch, modules, make_config(*tags, delay_offload_until_cuda_graph=delays))
    assert found == expected
    assert stats[tags[0]].groups == LAYERS * MICROBATCHES
    assert stats[tags[0]].d2h_bytes > 0


def test_an_offload_fraction_selects_the_same_layer_in_replay(monkeypatch, caplog):
    offload = make_config("expert_fc1", activation_offload_fraction=0.4)
    with graphed(monkeypatch, ["attn"], offload) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        training.trainer.run_step()
    assert list_offloaded(caplog) == [f"layers.0.expert_fc1 mb={number}" for number in range(MICROBATCHES)]


def test_delayed_groups_are_offloaded_after_the_next_graph_and_the_last_are_kept(monkeypatch, caplog):
    offload = make_config("expert_fc1", delay_offload_until_cuda_graph=True)
    with graphed(monkeypatch, ["attn"], offload) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        training.trainer.run_step()
        stats = training.trainer.integration.last_step.tags["expert_fc1"]
    assert list_offloaded(caplog) == [
        f"layers.{layer}.expert_fc1 mb={number}" for number in range(MICROBATCHES) for layer in range(LAYERS - 1)
    ]
    assert stats.recalled_bytes > stats.d2h_bytes / (LAYERS - 1)  # includes the last layer's bytes


def test_delayed_groups_are_offloaded_as_soon_as_the_next_graph_is_launched(monkeypatch, caplog):
    offload, offloaded = make_config("expert_fc1", delay_offload_until_cuda_graph=True), []
    flags = f"{FLAGS} --moe-token-dispatcher-type alltoall"  # no host wait holds its groups back
    with (
        graphed(monkeypatch, ["attn"], offload, flags=flags) as training,
        caplog.at_level(logging.DEBUG, logger="fgoffload.engine"),
    ):
        # Only attention is captured: the experts of the second layer run after its graph.
        second = training.trainer.chunks[0].decoder.layers[1]
        second.mlp.register_forward_pre_hook(lambda module, args: offloaded.append(list_offloaded(caplog)))
        training.trainer.run_step()
    assert offloaded[0] == ["layers.0.expert_fc1 mb=0"]


def test_the_last_groups_are_offloaded_at_the_end_of_forward_if_another_stage_follows(monkeypatch, caplog):
    offload = make_config("expert_fc1", delay_offload_until_cuda_graph=True)
    monkeypatch.setattr("fgoffload.integrations.megatron.adapter.layers._find_ending_block", lambda model: None)
    with graphed(monkeypatch, ["attn"], offload) as training, caplog.at_level(logging.DEBUG, logger="fgoffload.engine"):
        training.trainer.run_step()
    assert len(list_offloaded(caplog)) == LAYERS * MICROBATCHES


def test_graph_outputs_are_kept_from_the_first_replay_on(monkeypatch):
    with graphed(monkeypatch, ["attn"], make_config("expert_fc1")) as training:
        offload = training.trainer.integration
        layer, output = training.trainer.chunks[0].decoder.layers[0], torch.ones(64)
        offload.graphs.replay(layer, lambda: (output,))
        assert offload.engine.registry.find_reason_to_keep(output) is KeptReason.REFERENCED


def test_the_forward_of_a_layer_under_capture_starts_no_microbatch(monkeypatch):
    with graphed(monkeypatch, ["attn"], make_config("expert_fc1")) as training:
        graphs, offload = load_module(GRAPHS), training.trainer.integration
        layer = training.trainer.chunks[0].decoder.layers[0]
        hidden = torch.ones(32, 2, 32, requires_grad=True)
        graphs._set_capture_start()
        try:
            with ignore_expected_warnings():
                layer.forward(hidden, attention_mask=None)
        finally:
            graphs._set_capture_end()
        assert offload.microbatches_begun == {}


def test_the_engine_is_notified_of_the_step_that_a_full_iteration_graph_captures(monkeypatch):
    wrapper_class = load_module("megatron.core.full_cuda_graph").FullCudaGraphWrapper
    seen = []
    monkeypatch.setattr(wrapper_class, "__call__", lambda self, **kwargs: seen.append(offload.engine._captures_step))
    offload = megatron.apply(make_config("core_attn"), device=GraphDevice())
    try:
        wrapper = wrapper_class.__new__(wrapper_class)  # skips __init__, whose streams need CUDA
        wrapper.cuda_graph_warmup_steps = 2
        for iteration in range(4):
            monkeypatch.setitem(wrapper_class.curr_iteration, "training", iteration)
            wrapper(forward_only=False)
        wrapper(forward_only=True)
    finally:
        offload.remove()
    assert seen == [False, False, True, False, False]


def test_replaying_a_graph_after_removing_its_engine_raises(monkeypatch):
    with graphed(monkeypatch, ["attn"], make_config("core_attn")) as training:
        training.trainer.integration.remove()
        with pytest.raises(StateError, match="captured with activation offload, which has been removed since"):
            training.trainer.run_step()
