"""Tests Megatron's checkpoints without output: their inputs are offloaded and stay freed until backward."""

import functools
import types

import pytest
import torch
from support.tensors import assert_same_bits, leaf
from support.trainings import HIDDEN_BYTES, MIXED, make_config, make_trainer, train, write_plan

from fgoffload import Action
from fgoffload.engine import is_in_backward
from fgoffload.engine.identity import StorageRef
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.checkpoints import save_inputs, wrap_checkpoints
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns

random = pytest.importorskip("megatron.core.tensor_parallel.random")

pytestmark = pytest.mark.usefixtures("parallel")

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm"}
RUNS = 2 * 2
"""Forward calls of each kind of norm in one step: layers times microbatches."""


def train_and_track_inputs(flags, config):
    """Train a step; return its results, its stats by tag, and whether each norm's input was freed before backward."""
    inputs, freed = {tag: [] for tag in NORMS}, {tag: [] for tag in NORMS}

    def record_input(tag, tensor):
        if not is_in_backward():  # skips the norm's recompute
            inputs[tag].append(StorageRef(tensor))

    def record_freed(gradient):
        for tag, found in inputs.items():
            freed[tag] += [reference.is_freed for reference in found]
            found.clear()

    def record_before_backward(module, args, loss):
        loss.register_hook(record_freed)

    with make_trainer(flags, config) as trainer:
        model = trainer.chunks[0]
        model.register_forward_hook(record_before_backward)
        for layer in model.decoder.layers:
            for tag, name in NORMS.items():
                getattr(layer, name).register_forward_pre_hook(lambda module, args, tag=tag: record_input(tag, args[0]))
        result = trainer.run_step()
        return [(result.losses, result.gradient_digests)], trainer.integration.last_step.tags, freed


@pytest.fixture(scope="module")
def expected(parallel):
    return train(MIXED, steps=1)[0]


@pytest.mark.parametrize("tags", [("mlp_norm",), ("attn_norm", "mlp_norm")], ids=" ".join)
def test_the_offloaded_input_of_a_recomputed_norm_is_freed_after_forward(tags, expected, tmp_path):
    plan = {(layer, tag): Action.RECOMPUTE_AND_OFFLOAD for layer in range(2) for tag in tags}
    config = make_config(*tags, offload_plan=write_plan(tmp_path / "plan.json", plan))
    found, stats, freed = train_and_track_inputs(MIXED, config)
    assert found == expected
    # Only the input is offloaded: the recompute restores all other saved tensors of the norm.
    assert {tag: numbers.d2h_bytes for tag, numbers in stats.items()} == dict.fromkeys(tags, RUNS * HIDDEN_BYTES)
    assert {tag: numbers.held_elsewhere_bytes for tag, numbers in stats.items()} == dict.fromkeys(tags, 0)
    assert {tag: freed[tag] for tag in tags} == {tag: [True] * RUNS for tag in tags}


class Saved0161(torch.autograd.Function):
    """Saves the same as megatron-core 0.16.1: detached copies, and None for inputs that are None."""

    @staticmethod
    def forward(ctx, run_function, checkpoint, *args):
        ctx.run_function = run_function
        ctx.save_for_backward(*(arg if arg is None else detach(arg) for arg in args))
        with torch.no_grad():
            return run_function(*args)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [saved if saved is None else detach(saved) for saved in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            output = ctx.run_function(*inputs)
        torch.autograd.backward(output, gradient)
        found = [None if one is None else one.grad for one in inputs]
        return None, None, found[0], None, found[-1]


class SavedSince(Saved0161):
    """Saves the same as the development branch: the input tensors themselves."""

    @staticmethod
    def forward(ctx, run_function, checkpoint, *args):
        output = Saved0161.forward(ctx, run_function, checkpoint, *args)
        ctx.save_for_backward(*(arg for arg in args if arg is not None))
        return output


class SavesMore(Saved0161):
    """Also saves its output, unlike any version."""

    @staticmethod
    def forward(ctx, run_function, checkpoint, *args):
        output = Saved0161.forward(ctx, run_function, checkpoint, *args)
        ctx.save_for_backward(*ctx.to_save, output)
        return output


def detach(tensor):
    return tensor.detach().requires_grad_(tensor.requires_grad)


def run_checkpoint(function):
    """Run `function` under hooks that copy saved tensors; return the gradients, and whether its input was freed."""
    x, parameter = leaf(64), torch.nn.Parameter(leaf(64, seed=1).detach())
    hidden = x * 2
    reference = StorageRef(hidden)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        output = function.apply(lambda tensor, *others: tensor.sin() * others[-1], None, hidden, None, parameter)
    del hidden
    is_freed = reference.is_freed
    output.sum().backward()
    return [x.grad, parameter.grad], is_freed


@pytest.mark.parametrize(
    ("function", "freed"), [(Saved0161, (False, True)), (SavedSince, (True, True)), (SavesMore, (False, False))]
)
def test_checkpoint_inputs_can_be_freed_in_each_version_unless_saves_are_unknown(function, freed):
    patched = type("Patched", (function,), {"forward": staticmethod(functools.partial(save_inputs, function.forward))})
    expected, is_freed = run_checkpoint(function)
    found, is_freed_when_patched = run_checkpoint(patched)
    assert_same_bits(expected, found)
    assert (is_freed, is_freed_when_patched) == freed


# Which checkpoints the integration replaces.


def make_offload(*, recomputes):
    """Return a fake integration with the members that checkpoints use."""
    actions = types.SimpleNamespace(recomputes=recomputes)
    return types.SimpleNamespace(actions=actions, keep_recomputed=list, open_reruns=OpenReruns())


@pytest.mark.parametrize(
    ("recomputes", "fp8_is_on", "attributes", "is_ours"),
    [
        (True, False, {}, True),
        (False, False, {}, False),
        (True, True, {}, False),
        (True, True, {"fp8": False}, True),
        (True, False, {"ckpt_manager": types.SimpleNamespace(add_checkpoint=lambda one: None)}, False),
    ],
    ids=["a plan", "no plan", "FP8", "FP8 disabled here", "with a manager"],
)
def test_checkpoints_in_a_plan_recompute_within_their_graph(recomputes, fp8_is_on, attributes, is_ours):
    checkpoint = random.CheckpointWithoutOutput()
    vars(checkpoint).update(attributes)
    offload = make_offload(recomputes=recomputes)
    with apply_cpu_support(), pytest.MonkeyPatch.context() as patch, Patches() as patches:
        wrap_checkpoints(patches, lambda: offload)
        if fp8_is_on:
            state = types.SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: None)
            patch.setattr(random, "FP8GlobalStateManager", state)
        output = checkpoint.checkpoint(torch.sin, leaf(3) * 1)
    assert type(output.grad_fn).__name__ == ("SinBackward0" if is_ours else "CheckpointWithoutOutputFunctionBackward")


@pytest.mark.parametrize("where", ["inside a checkpoint", "without gradients", "in a CUDA graph's warm-up"])
def test_megatrons_own_checkpoint_runs_outside_plain_training(where, monkeypatch):
    offload, checkpoints = make_offload(recomputes=True), []

    def run_checkpoint_without_output(hidden):
        checkpoints.append(random.CheckpointWithoutOutput())
        return checkpoints[-1].checkpoint(torch.sin, hidden)

    with apply_cpu_support(), Patches() as patches:
        wrap_checkpoints(patches, lambda: offload)
        if where == "without gradients":
            with torch.no_grad():
                run_checkpoint_without_output(leaf(3))
        elif where == "inside a checkpoint":
            torch.utils.checkpoint.checkpoint(run_checkpoint_without_output, leaf(3) * 1, use_reentrant=False)
        else:
            monkeypatch.setattr(load_module("megatron.core.transformer.cuda_graphs"), "is_graph_warmup", lambda: True)
            run_checkpoint_without_output(leaf(3) * 1)
    assert checkpoints
    assert all("_fgoffload_rerun" not in vars(one) for one in checkpoints)
