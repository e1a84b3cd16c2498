"""Tests that recompute reuses and checks the token counts of its forward, so that the host does not wait again."""

import functools

import pytest
import torch
from support.trainings import MOE, make_config, make_trainer, train, write_plan

from fgoffload import Action, StateError
from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.host_waits import known_counts
from fgoffload.integrations.megatron.patching.imports import load_module

pytestmark = pytest.mark.usefixtures("parallel")

ALLTOALL = f"{MOE} --moe-token-dispatcher-type alltoall"
UNITS = ("moe", "layer")


class Event:
    """Fakes a CUDA event that tests complete by hand and that the host cannot wait for."""

    def __init__(self):
        self.is_complete = False

    def query(self):
        return self.is_complete


@pytest.fixture
def received(monkeypatch):
    """Record the counts that dispatchers receive: whether a forward's counts are known, the returned and the new ones."""
    found = []
    original = known_counts._StoredCounts.choose

    def choose(self, count):
        given = original(self, count)
        found.append((self.position is not None, given, count))
        return given

    monkeypatch.setattr(known_counts._StoredCounts, "choose", choose)
    return found


def make_plan(tmp_path, unit):
    plan = write_plan(tmp_path / "plan.json", {(1, unit): Action.RECOMPUTE})
    return make_config(offload_plan=plan)


@pytest.mark.parametrize("unit", UNITS)
def test_recompute_reuses_the_token_counts_of_its_forward(unit, received, tmp_path):
    expected, _ = train(ALLTOALL)
    results, _ = train(ALLTOALL, make_plan(tmp_path, unit))
    assert results == expected
    first = [given for is_known, given, _ in received if not is_known]
    again = [given for is_known, given, _ in received if is_known]
    # The microbatches run one after another. Recompute returns the objects of its forward, not equal copies.
    assert len(first) == len(again) > 0
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert all(torch.equal(given, own) for is_known, given, own in received if is_known)


def test_each_forward_keeps_its_own_counts_until_its_recompute():
    counts = known_counts.KnownCounts()
    move = functools.partial(counts._move, lambda tensor: tensor if tensor is None else tensor.clone())
    first, second = (counts._reuse_counts(lambda value=value: (move(torch.tensor(value)), move(None))) for value in (1, 2))
    before = first(), second()
    assert move(torch.tensor(3)).item() == 3  # outside any checkpoint
    again = first(), second(), second()
    assert all(own is known for (own, _), (known, _) in zip(again, (*before, before[1]), strict=True))


def test_a_recompute_that_requests_more_counts_than_its_forward_raises():
    counts = known_counts.KnownCounts()
    requested = [torch.tensor(1)]
    move = functools.partial(counts._move, lambda tensor: tensor)
    function = counts._reuse_counts(lambda: [move(one) for one in requested])
    function()
    requested.append(torch.tensor(2))
    with pytest.raises(StateError, match="requested more token counts than its forward"):
        function()


def test_the_host_synchronizes_in_forward_but_not_in_recompute(monkeypatch, tmp_path):
    waited = []
    with make_trainer(ALLTOALL, make_plan(tmp_path, "moe")) as trainer:
        dispatcher = load_module(DISPATCHERS).MoEAlltoAllTokenDispatcher
        stream = dispatcher.cuda_dtoh_stream
        monkeypatch.setattr(type(stream), "synchronize", lambda self: waited.append(self))
        trainer.run_step()
    # Forward of two layers in two microbatches; the recompute of layer 1 does not wait.
    assert len(waited) == 4


@pytest.mark.parametrize("when", ["immediately", "later"])
def test_a_recompute_that_routes_differently_raises_once_its_counts_arrive(monkeypatch, when):
    counts = known_counts.KnownCounts()
    first, again, event = torch.tensor([3, 5]), torch.tensor([4, 4]), Event()
    if when == "later":
        monkeypatch.setattr(torch.cuda, "Event", Event)
    requested = iter((first, again, first))
    dispatcher = type("Dispatcher", (), {"d2h_event": event})()
    move = functools.partial(counts._move, lambda tensor: tensor)
    wait = functools.partial(counts._wait, lambda dispatcher, point: move(next(requested)))
    function = counts._reuse_counts(lambda: wait(dispatcher, "before_permutation_1"))
    assert function() is first
    assert function() is first
    dispatcher.d2h_event.synchronize()  # returns, although the event has no `synchronize`
    if when == "later":
        assert function() is first
        event.is_complete = True
    with pytest.raises(StateError, match=r"sent \[4, 4\] tokens to its experts or ranks, but its forward sent \[3, 5\]"):
        function()
