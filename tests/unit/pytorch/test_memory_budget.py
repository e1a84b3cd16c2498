"""A memory budget: the same bits, a peak within the budget, and a recompute only where a trial allows it."""

import pytest
import torch
from support.models import ALL, Block, Net, check_equal, copy_gradients, make_inputs, make_net
from torch import nn

import fgoffload


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(self.mlp, nn.BatchNorm1d(64), nn.Dropout(0.1))


def train(memory, kind):
    torch.manual_seed(0)
    model = Net(layers=0)
    model.layers.extend(kind() for _ in range(4))
    handle = None if memory is None else fgoffload.offload(model, memory=memory, config=ALL)
    found = []
    for step in range(4):  # gradients accumulate
        loss = model(make_inputs(step, rows=512) * 1.0)
        loss.backward()
        found += [loss.detach(), *copy_gradients(model), *(one.clone() for one in model.buffers())]
        with torch.no_grad():
            model(make_inputs())
    return found, handle


@pytest.mark.parametrize(("kind", "mib", "action"), [(Block, 5, "mlp: recompute"), (Normed, 8, "offload")])
def test_training_within_a_budget_has_the_same_bits_and_the_planned_peak(kind, mib, action):
    found, handle = train(f"{mib}MiB", kind)
    check_equal(train(None, kind)[0], found)
    planned, text = handle.planned, fgoffload.explain(handle)
    assert planned.measured.peak_bytes <= min(mib << 20, 1.03 * planned.peak_bytes)
    assert action in text
    assert ("mlp cannot be recomputed: it changes a buffer" in text) == ("recompute" not in action)


def test_a_budget_that_cannot_be_reached_names_the_smallest():
    model = make_net()
    fgoffload.offload(model, memory="600KiB", config=ALL)
    model(make_inputs(rows=512) * 1.0).backward()
    with pytest.raises(fgoffload.BudgetError, match="Give a budget of"):
        model(make_inputs(rows=512) * 1.0)
