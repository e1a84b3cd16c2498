"""Checkpoints inside, outside and across regions: the same bits, and no checkpoint undone."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from support.sites import Sites, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from fgoffload import OffloadConfig, TransferPolicy
from fgoffload.engine import ActivationLedger, CpuDevice, DelayedCpuDevice, OffloadEngine
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.imports import load_module

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
NBYTES = 64 * 64 * 4


class Net:
    """Weights, and pieces of a model that save several storages each."""

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


def several_in_a_region(net: Net, sites: Sites) -> torch.Tensor:
    return sites(lambda h: net.recompute(net.piece, net.recompute(net.piece, net.recompute(net.piece, h)).exp()), net.x * 2)


def between_two_regions(net: Net, sites: Sites) -> torch.Tensor:
    h = sites(lambda h: h.exp(), net.x * 2)
    return sites(lambda h: h.cos(), net.recompute(net.piece, h))


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
    *(in_a_region, around_a_region, over_several_regions, several_in_a_region, between_two_regions),
    *(nested_around_a_region, nested_in_a_region, region_in_checkpoint_in_region, watched_layers),
)
MOVED_STORAGES = dict.fromkeys(PLACES, 1) | {
    around_a_region: 0,
    over_several_regions: 0,
    nested_around_a_region: 0,
    several_in_a_region: 3,  # the exponential's output is the second checkpoint's input too
    between_two_regions: 2,
    region_in_checkpoint_in_region: 2,  # the checkpoint's input, and the exponential's output
    watched_layers: 3,  # the outputs of the hyperbolic tangents
}
EVERY_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def run(place, net: Net, engine: OffloadEngine | None) -> tuple[list[torch.Tensor], int, int]:
    """Return the gradients, how many tensors forward saved, and how often pieces ran."""
    ledger = ActivationLedger(parameters=net.leaves)
    with engine.observe(ledger) if engine else contextlib.nullcontext(), ledger.watch():
        output = place(net, Sites(engine))
        saves = ledger.samples[-1].position
    output.sum().backward()  # a reentrant checkpoint knows no `torch.autograd.grad`
    return [tensor.grad for tensor in net.leaves], saves, net.runs


def compare(place, recompute: Callable, make_device) -> int:
    """Check that bits, saves and runs are the same without and with an engine, and return the bytes that left."""
    engine = make_engine(make_device(), policy=TransferPolicy(window_bytes=0, prefetch_bytes=NBYTES))
    expected, *numbers = run(place, Net(recompute), None)
    found, *numbers_with_engine = run(place, Net(recompute), engine)
    assert_same_bits(expected, found)
    # More saves would be a checkpoint that was undone; more runs, one that recomputes twice.
    assert numbers == numbers_with_engine
    assert not has_hooks()
    assert engine.arena.used_bytes == 0
    engine.close()
    return engine.finish_step().d2h_bytes


# A reentrant checkpoint inside of another runs without grad at first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@DEVICES
@KINDS
@EVERY_PLACE
def test_checkpoints_and_regions_in_any_nesting_give_the_same_bits_and_save_as_little(place, use_reentrant, make_device):
    moved_bytes = compare(place, functools.partial(checkpoint, use_reentrant=use_reentrant), make_device)
    assert moved_bytes == MOVED_STORAGES[place] * NBYTES


@DEVICES
@pytest.mark.parametrize("stops_early", [True, False])
@EVERY_PLACE
def test_a_recompute_that_stops_early_or_does_not_gives_the_same_bits(place, stops_early, make_device):
    def recompute(function, h: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(stops_early):
            return checkpoint(function, h, use_reentrant=False)

    assert compare(place, recompute, make_device) == MOVED_STORAGES[place] * NBYTES


def test_an_early_stop_leaves_no_region_open():
    # The recompute stops by an exception in the middle of the region, once it has what backward needs.
    net, finished = Net(functools.partial(checkpoint, use_reentrant=False)), []

    def function(h: torch.Tensor) -> torch.Tensor:
        h = h.exp().sin()
        finished.append(True)
        return h * 2

    engine = make_engine()
    sites = Sites(engine)
    output = net.recompute(lambda h: sites(function, h), net.x * 2)
    output.sum().backward()
    assert finished == [True]  # in forward, and not in the recompute
    assert not has_hooks()
    assert sites(torch.sin, net.x * 2).grad_fn._saved_self is not None
    assert engine.finish_step().d2h_bytes == NBYTES


POLICIES = {
    "products": lambda context, op, *args, **options: (
        CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "nothing": lambda context, op, *args, **options: CheckpointPolicy.PREFER_RECOMPUTE,
    "everything": lambda context, op, *args, **options: CheckpointPolicy.MUST_SAVE,
}


@DEVICES
@pytest.mark.parametrize("policy", POLICIES)
@EVERY_PLACE
def test_a_selective_checkpoint_gives_the_same_bits_and_recomputes_as_often(place, policy, make_device):
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy], allow_cache_entry_mutation=False)
    compare(place, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts), make_device)


@DEVICES
@KINDS
def test_a_chain_of_checkpoints_whose_pieces_have_regions_gives_the_same_bits(use_reentrant, make_device):
    def chain(net: Net, sites: Sites) -> torch.Tensor:
        pieces = [lambda h: sites(net.piece, h)] * 4
        h = sites(torch.sin, net.x * 2)
        return sites(torch.cos, checkpoint_sequential(pieces, 2, h, use_reentrant=use_reentrant))

    compare(chain, None, make_device)


@KINDS
def test_an_exception_in_a_recompute_leaves_no_hooks_and_no_host_memory(use_reentrant):
    net, engine = Net(functools.partial(checkpoint, use_reentrant=use_reentrant)), make_engine(DelayedCpuDevice())
    sites = Sites(engine)

    def fail_the_second_time(h: torch.Tensor) -> torch.Tensor:
        if net.runs:
            raise ValueError("the user's own")
        return net.piece(h)

    output = sites(lambda h: net.recompute(lambda h: sites(fail_the_second_time, h), h), sites(torch.sin, net.x * 2))
    try:
        output.sum().backward()
    except ValueError:
        net.runs = -1
    assert net.runs == -1
    assert not has_hooks()
    del output
    assert engine.arena.used_bytes == 0
    compare(in_a_region, functools.partial(checkpoint, use_reentrant=use_reentrant), DelayedCpuDevice)


def test_saved_tensors_of_a_checkpoint_in_a_region_can_be_looked_at_outside_of_backward():
    net, engine = Net(None), make_engine()
    sites = Sites(engine)
    h = net.x * 2
    output = checkpoint(lambda h: sites(lambda h: h.sin().exp(), h), h, use_reentrant=False)
    assert_same_bits([h.sin().exp()], [output.grad_fn._saved_result])  # recomputes, in no backward
    assert engine.finish_step().tags == {}
    assert not has_hooks()


def run_without_output(offload: "megatron.MegatronOffload | None", net: Net, *, is_end_late: bool) -> list[torch.Tensor]:
    """A norm whose output Megatron empties after its last use and recomputes, between two sites; three microbatches."""
    recompute = load_module("megatron.core.tensor_parallel.random").CheckpointWithoutOutput
    for microbatch in range(3):
        if offload:
            offload.begin_microbatch(0)
        regions = []

        def save(tag: str, function: Callable, h: torch.Tensor, regions: list = regions) -> torch.Tensor:
            region = offload.open_region(tag) if offload else None
            if region is None:
                return function(h)
            region.enter(h)
            with region.saving():
                output = function(h)
            regions.append(tag)
            return output

        h = net.x * (microbatch + 1)
        norm = recompute()
        normed = save("attn_norm", lambda h, norm=norm: norm.checkpoint(lambda h: h.exp().softmax(-1), h), h)
        mixed = save("qkv_linear", lambda n: (n @ net.w).sin(), normed)
        if not is_end_late and offload:
            for tag in regions:
                offload.end_region(tag)
        norm.discard_output_and_register_recompute(mixed)
        if is_end_late and offload:
            for tag in regions:
                offload.end_region(tag)
        (h + mixed).sum().backward()
    return [net.x.grad, net.w.grad]


@pytest.mark.skipif(not needs_cpu_support(), reason="on the CPU")
@DEVICES
@pytest.mark.parametrize("is_end_late", [False, True], ids=["ends-before-the-discard", "ends-after-the-discard"])
def test_megatrons_checkpoint_without_output_gives_the_same_bits_and_moves_its_input_alone(is_end_late, make_device):
    with apply_cpu_support():
        expected = run_without_output(None, Net(None), is_end_late=is_end_late)
        config = OffloadConfig(offload_modules=("attn_norm", "qkv_linear"), min_offloaded_tensor_size=0, offload_window_bytes=0)
        offload = megatron.apply(config, device=make_device())
        try:
            found = run_without_output(offload, Net(None), is_end_late=is_end_late)
            tags = offload.engine.finish_step().tags
        finally:
            offload.remove()
    assert_same_bits(expected, found)
    assert tags["attn_norm"].d2h_bytes == 3 * NBYTES  # what it recomputes from
    assert tags["qkv_linear"].d2h_bytes == 3 * NBYTES  # the product; the norm's output is the recompute's
    assert tags["qkv_linear"].kept_bytes == {"its storage belongs to a recompute, which empties and refills it": 3 * NBYTES}
