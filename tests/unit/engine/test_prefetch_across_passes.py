"""Tests prefetching a backward's first groups during the previous pass, once the order of a step is known."""

import pytest
import torch
from support.sites import Sites, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import TransferPolicy
from fgoffload.engine import ActivationLedger, pass_order

pytestmark = pytest.mark.quick

NBYTES = 64 * 64 * 4
PREFETCH_BYTES = 2 * NBYTES
ORDERS = {
    "1F1B": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "interleaved": "F0 F1 F2 F3 B2 F4 B3 F5 B0 F6 B1 F7 B6 B7 B4 B5",
    "overlapped": "F0 F1 F2 B1 F3 B0 B3 B2",
    "forwards, then backwards": "F0 F1 F2 B0 B1 B2",
    "last first": "F0 F1 F2 B2 B1 B0",
}
EACH_ORDER = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


class Training:
    """Steps of microbatches with three sites each and backwards in any order; `-` instead of `B` drops a graph."""

    def __init__(self, *, is_offloaded: bool = True) -> None:
        self.engine = (
            make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=PREFETCH_BYTES)) if is_offloaded else None
        )
        self.weight = leaf(64, 64)
        self.ledger = ActivationLedger(parameters=[self.weight])

    def run(self, order: str) -> torch.Tensor:
        """Return the gradient of a step."""
        self.weight.grad = None
        outputs, lanes = {}, {}
        for kind, number in map(tuple, order.split()):
            if kind == "F":
                sites = Sites(self.engine, microbatch=int(number))
                lanes[number] = sites.lane
                outputs[number] = sites(torch.sin, sites(torch.sin, sites(torch.sin, self.weight * (2 + int(number))))).sum()
            elif kind == "B":
                outputs.pop(number).backward()
            else:
                del outputs[number]
            assert sum(lane.ahead_bytes for lane in lanes.values()) <= PREFETCH_BYTES
        return self.weight.grad

    def measure(self, order: str) -> tuple[int, int]:
        """Return the prefetch misses and the peak of a step."""
        self.ledger.samples.clear()
        with self.engine.observe(self.ledger), self.ledger.watch():
            self.run(order)
        return self.engine.finish_step().prefetch_misses, self.ledger.peak_bytes


@EACH_ORDER
def test_a_known_order_removes_prefetch_misses_without_raising_the_peak(order):
    training = Training()
    unknown_misses, unknown_peak_bytes = training.measure(order)
    misses, peak_bytes = training.measure(order)
    assert unknown_misses == order.count("B")
    assert misses == ("F2 B2" in order)  # no prefetch during its own forward
    assert peak_bytes <= unknown_peak_bytes


@EACH_ORDER
def test_any_order_is_bitwise_identical_and_releases_all_host_memory(order):
    offloaded, plain = Training(), Training(is_offloaded=False)
    # The known order is wrong after each change, and the graph expected next may be dropped.
    for one in (order, order, ORDERS["last first"], "F0 F1 F2 B0 -1 B2", order, "F0 F1 F2 -2 B1 B0", order):
        assert_same_bits([plain.run(one)], [offloaded.run(one)])
        assert offloaded.engine.arena.used_bytes == 0


def test_prefetched_tensors_are_freed_if_another_backward_runs_next():
    training = Training()
    training.run("F0 F1 F2 B0 B1 B2")
    _, known_peak_bytes = training.measure("F0 F1 F2 B0 B1 B2")
    _, changed_peak_bytes = training.measure("F0 F1 F2 B1 B0 B2")
    assert changed_peak_bytes <= known_peak_bytes


def test_the_order_is_still_learned_while_an_old_graph_is_kept_alive(monkeypatch):
    monkeypatch.setattr(pass_order, "MOST_FORWARDS", 4)
    training = Training()
    kept = Sites(training.engine)(torch.sin, training.weight * 2)
    misses = [training.measure("F0 F1 F2 B0 B1 B2")[0] for _ in range(3)]
    assert (misses[0], misses[-1]) == (3, 0)
    del kept
