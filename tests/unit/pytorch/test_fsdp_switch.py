"""Tests verl's entry point with FSDP1 and FSDP2: bitwise identical, and no extra gathers under checkpoints."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from support.models import ALL, LAYERS, ROW_BYTES, Block, make_inputs, make_net
from support.ranks import MICROBATCHES, RankResult, Scenario, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fgoffload import ConfigError
from fgoffload.integrations.fsdp import enable_activation_offloading
from fgoffload.integrations.pytorch.layers import find_layers

SCENARIOS = [Scenario(wrapper, offload) for wrapper in ("fsdp", "fsdp2") for offload in ("none", "switch", "checkpoints")]
LATER = [Scenario("fsdp", "later"), Scenario("fsdp2", "later"), Scenario("fsdp2", "later", dtype="bfloat16")]
EACH_OFFLOADED = pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS if one.offload != "none"], ids=lambda one: f"{one.wrapper}-{one.offload}"
)


@functools.cache
def run_all() -> dict[Scenario, list[RankResult]]:
    return run_ranks(SCENARIOS + LATER)


@EACH_OFFLOADED
def test_losses_and_gradients_are_bitwise_identical_without_extra_gathers(scenario):
    plain = run_all()[dataclasses.replace(scenario, offload="none")]
    for one, other in zip(plain, run_all()[scenario], strict=True):
        assert one.losses == other.losses
        assert one.gradients == other.gradients
        assert one.gathers == other.gathers > 0


@EACH_OFFLOADED
def test_layers_are_offloaded_or_only_their_inputs_if_checkpointed(scenario):
    for rank in run_all()[scenario]:
        offloaded_bytes = rank.moved["layers"]
        inputs = MICROBATCHES * LAYERS * ROW_BYTES
        assert offloaded_bytes == inputs if scenario.offload == "checkpoints" else offloaded_bytes > 10 * inputs


@pytest.mark.parametrize("scenario", LATER, ids=lambda one: f"{one.wrapper}-{one.dtype}")
def test_repeating_a_step_with_offload_gives_the_same_weights(scenario):
    """As in verl's own test, load a state into a model that is offloaded after its first step."""
    for rank in run_all()[scenario]:
        loss, loss_after, loss_again, loss_after_again = rank.losses
        assert (loss, loss_after) == (loss_again, loss_after_again)
        assert loss != loss_after
        count = len(rank.gradients) // 2
        assert rank.gradients[:count] == rank.gradients[count:]
        assert rank.moved["layers"] > 0


def test_an_unknown_strategy_and_a_model_without_fsdp_units_are_refused():
    with pytest.raises(ConfigError, match=r"strategy 'ddp' is not one of fsdp, fsdp2\. For other models"):
        enable_activation_offloading(make_net(), "ddp")
    with pytest.raises(ConfigError, match="No submodule of Linear is an FSDP unit"):
        enable_activation_offloading(nn.Linear(2, 2), "fsdp2")


def shard(model, layers):
    mesh = init_device_mesh("cpu", (1,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_checkpointing_layers_switches_off_the_models_own_checkpointing(enable_ckpt):
    model = make_net()
    for layer in model.layers:
        layer.gradient_checkpointing = True
    with enable_activation_offloading(shard(model, model.layers), "fsdp2", enable_ckpt):
        assert {layer.gradient_checkpointing for layer in model.layers} == {not enable_ckpt}


@pytest.mark.usefixtures("_one_rank")
def test_a_disabled_config_leaves_the_models_own_checkpointing_on():
    model = make_net()
    model.layers[0].gradient_checkpointing = True
    config = dataclasses.replace(ALL, enabled=False)
    with enable_activation_offloading(shard(model, model.layers), "fsdp2", enable_ckpt=True, config=config):
        assert model.layers[0].gradient_checkpointing


@pytest.mark.usefixtures("_one_rank")
def test_a_separately_sharded_embedding_is_not_a_layer():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model, model)
    assert [unit.name for unit in find_layers(model)] == ["1", "2"]


@pytest.mark.usefixtures("_one_rank")
def test_layers_are_not_checkpointed_in_evaluation_or_without_gradients():
    model = make_net()
    runs = []
    with enable_activation_offloading(shard(model, model.layers), "fsdp2", enable_ckpt=True, config=ALL):
        model.layers[0].mlp.register_forward_pre_hook(lambda *given: runs.append(torch.is_grad_enabled()))
        model(make_inputs()).backward()
        assert len(runs) == 2
        with torch.no_grad():
            model(make_inputs())
        model.eval()(make_inputs()).backward()
        assert len(runs) == 4


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp1_forward_is_not_recomputed_when_it_wraps_a_checkpoint():
    model = make_net()
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *given: calls.append(given))
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    with enable_activation_offloading(model, "fsdp", enable_ckpt=True, config=ALL) as handle:
        model(make_inputs()).backward()
        assert len(calls) == 1  # the recompute starts inside the layer
        assert handle.stats().d2h_bytes == LAYERS * ROW_BYTES
