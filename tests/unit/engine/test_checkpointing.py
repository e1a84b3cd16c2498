"""Tests checkpoints inside, outside and across regions: bitwise identical, and no checkpoint loses its effect."""

import contextlib
import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fgoffload import TransferPolicy
from fgoffload.engine import ActivationLedger, OffloadEngine

pytestmark = pytest.mark.quick

KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
NBYTES = 64 * 64 * 4


class Net:
    """Weights, and a piece of a model that saves several storages."""

    def __init__(self, recompute: Callable) -> None:
        self.x, self.w = leaf(64, 64), torch.nn.Parameter(leaf(64, 64, seed=1).detach())
        self.leaves = [self.x, self.w]
        self.recompute = recompute
        self.runs = 0
        """How often `piece` ran: forward and recompute together."""

    def piece(self, h: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return (h @ self.w).sin().softmax(-1) * h


def in_a_region(net: Net, sites: Sites) -> torch.Tensor:
    return sites(lambda h: net.recompute(net.piece, h), net.x * 2)


def around_a_region(net: Net, sites: Sites) -> torch.Tensor:
    return net.recompute(lambda h: sites(net.piece, h), net.x * 2)


def over_several_regions(net: Net, sites: Sites) -> torch.Tensor:
    return net.recompute(lambda h: sites(net.piece, sites(net.piece, sites(net.piece, h))), net.x * 2)


def nested_around_a_region(net: Net, sites: Sites) -> torch.Tensor:
    return net.recompute(lambda h: net.recompute(lambda h: sites(net.piece, h), h.sin()).cos(), net.x * 2)


def nested_in_a_region(net: Net, sites: Sites) -> torch.Tensor:
    return sites(lambda h: net.recompute(lambda h: net.recompute(net.piece, h.sin()).cos(), h), net.x * 2)


def region_in_checkpoint_in_region(net: Net, sites: Sites) -> torch.Tensor:
    return sites(lambda h: net.recompute(lambda h: sites(net.piece, h.sin()).cos(), h).exp(), net.x * 2)


def watched_layers(net: Net, sites: Sites) -> torch.Tensor:
    h = net.x * 2
    for _ in range(3):
        with sites.watched():
            h = sites(lambda h: h.tanh(), h) + net.recompute(lambda h: sites(net.piece, h), h)
    return h


PLACES = (
    *(in_a_region, around_a_region, over_several_regions),
    *(nested_around_a_region, nested_in_a_region, region_in_checkpoint_in_region, watched_layers),
)
OFFLOADED_STORAGES = dict.fromkeys(PLACES, 1) | {
    around_a_region: 0,
    over_several_regions: 0,
    nested_around_a_region: 0,
    region_in_checkpoint_in_region: 2,  # the checkpoint's input, and the exponential's output
    watched_layers: 3,  # the outputs of the hyperbolic tangents
}
EACH_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def run(place, net: Net, engine: OffloadEngine | None) -> tuple[list[torch.Tensor], int, int]:
    """Return the gradients, the number of tensors that forward saved, and how often `piece` ran."""
    ledger = ActivationLedger(parameters=net.leaves)
    with engine.observe(ledger) if engine else contextlib.nullcontext(), ledger.watch():
        output = place(net, Sites(engine))
        saves = ledger.samples[-1].position
    output.sum().backward()  # reentrant checkpoints do not support `torch.autograd.grad`
    return [tensor.grad for tensor in net.leaves], saves, net.runs


def compare(place, recompute: Callable, make_device) -> int:
    """Check that results, saves and runs are the same with and without an engine, and return the offloaded bytes."""
    engine = make_engine(make_device(), policy=TransferPolicy(window_bytes=0, prefetch_bytes=NBYTES))
    expected, *numbers = run(place, Net(recompute), None)
    found, *numbers_with_engine = run(place, Net(recompute), engine)
    assert_same_bits(expected, found)
    # More saves mean that a checkpoint lost its effect; more runs, that it recomputes twice.
    assert numbers == numbers_with_engine
    assert not has_hooks()
    assert engine.arena.used_bytes == 0
    engine.close()
    return engine.finish_step().d2h_bytes


# A nested reentrant checkpoint runs without grad at first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@KINDS
@EACH_PLACE
def test_nested_checkpoints_and_regions_are_bitwise_identical_without_extra_saves(place, use_reentrant):
    offloaded_bytes = compare(place, functools.partial(checkpoint, use_reentrant=use_reentrant), DelayedCpuDevice)
    assert offloaded_bytes == OFFLOADED_STORAGES[place] * NBYTES


POLICIES = {
    "matmuls": lambda context, op, *args, **options: (
        CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "nothing": lambda context, op, *args, **options: CheckpointPolicy.PREFER_RECOMPUTE,
    "everything": lambda context, op, *args, **options: CheckpointPolicy.MUST_SAVE,
}


HAS_CHOICE = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Since torch 2.14, users choose whether hooks see the tensors that a selective checkpoint keeps; torch warns otherwise."""


def make_selective(policy: str, *, respects_hooks: bool):
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy], allow_cache_entry_mutation=False)
    choice = {"respect_saved_tensors_hooks": respects_hooks} if HAS_CHOICE else {}
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts, **choice)


@pytest.mark.parametrize("respects_hooks", [False, True] if HAS_CHOICE else [False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", [in_a_region, around_a_region, watched_layers], ids=lambda place: place.__name__)
def test_selective_checkpoints_are_bitwise_identical_without_extra_recompute(place, policy, respects_hooks):
    compare(place, make_selective(policy, respects_hooks=respects_hooks), DelayedCpuDevice)


@pytest.mark.skipif(not HAS_CHOICE, reason="torch before 2.14 hides from hooks the tensors that a selective checkpoint keeps")
def test_tensors_kept_by_a_selective_checkpoint_are_offloaded_if_it_respects_hooks():
    hidden, offloaded = (
        compare(in_a_region, make_selective("everything", respects_hooks=choice), DelayedCpuDevice) for choice in (False, True)
    )
    assert offloaded > hidden


@KINDS
def test_an_exception_during_recompute_leaks_no_hooks_and_no_host_memory(use_reentrant):
    net, engine = Net(functools.partial(checkpoint, use_reentrant=use_reentrant)), make_engine(DelayedCpuDevice())
    sites = Sites(engine)

    def fail_in_recompute(h: torch.Tensor) -> torch.Tensor:
        if net.runs:
            raise ValueError("user error")
        return net.piece(h)

    output = sites(lambda h: net.recompute(lambda h: sites(fail_in_recompute, h), h), sites(torch.sin, net.x * 2))
    try:
        output.sum().backward()
    except ValueError:
        net.runs = -1
    assert net.runs == -1
    assert not has_hooks()
    del output
    assert engine.arena.used_bytes == 0
    compare(in_a_region, functools.partial(checkpoint, use_reentrant=use_reentrant), DelayedCpuDevice)
