"""Tests memory budgets: bitwise identical, a peak within the budget, and recompute only if a trial allows it."""

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import ALL, Block, Net, check_equal, copy_gradients, make_inputs, make_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fgoffload
from fgoffload.engine import CpuDevice
from fgoffload.integrations.budget import handle as budget_handle
from fgoffload.integrations.budget.plans import BudgetPlan, Planner, StepReading, merge_blocks
from fgoffload.integrations.budget.trial import Measured, MeasuredBlock
from fgoffload.integrations.pytorch.forward import has_hooks
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.transfer_schedule import TransferPolicy


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(self.mlp, nn.BatchNorm1d(64), nn.Dropout(0.1))


def train(memory, kind, *, is_sharded):
    torch.manual_seed(0)
    model = Net(layers=0)
    model.layers.extend(kind() for _ in range(4))
    for part in (*model.layers, model) if is_sharded else ():
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    handle = None if memory is None else fgoffload.offload(model, memory=memory, config=ALL)
    found = []
    for step in range(18):  # gradients accumulate; step 15 is compared with the plan, step 16 with a better plan
        loss = model(make_inputs(step, rows=512) * 1.0)
        loss.backward()
        gradients = [one.to_local() if is_sharded else one for one in copy_gradients(model)]
        found += [loss.detach(), *gradients, *(one.clone() for one in model.buffers())]
        with torch.no_grad():
            model(make_inputs())
    return found, handle


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize(("kind", "mib", "action"), [(Block, 5, "recompute"), (Normed, 8, "offload")])
def test_training_within_a_budget_is_bitwise_identical_with_the_planned_peak(monkeypatch, kind, mib, action, is_sharded):
    link = LinkModel(d2h_bytes_per_s=1e7, h2d_bytes_per_s=1e7, duplex_bytes_per_s=1e7)  # so slow that recompute wins
    monkeypatch.setattr(budget_handle, "measure_link", lambda *_, **__: SimpleNamespace(to_model=lambda: link))
    monkeypatch.setattr(CpuDevice, "measure_seconds", lambda *_: 1e-3)  # a loaded machine may be slower than this link
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, handle = train(f"{mib}MiB", kind, is_sharded=is_sharded)
        check_equal(train(None, kind, is_sharded=is_sharded)[0], found)
    finally:
        dist.destroy_process_group()
    planned, text = handle.planned, fgoffload.explain(handle)
    assert planned.measured.peak_bytes <= min(mib << 20, 1.03 * planned.peak_bytes)
    assert action in text
    assert ("mlp cannot be recomputed: it changes a buffer" in text) == ("recompute" not in action)


def test_an_unreachable_budget_is_refused_with_the_smallest_feasible_one():
    model = make_net()
    fgoffload.offload(model, memory="600KiB", config=ALL)
    model(make_inputs(rows=512) * 1.0).backward()
    with pytest.raises(fgoffload.BudgetError, match=r"recompute and offload\. Use a budget of \d\.\d+MiB or more"):
        model(make_inputs(rows=512) * 1.0)


def test_layer_parts_below_the_minimum_size_stay_on_the_gpu():
    model = make_net()
    handle = fgoffload.offload(model, memory="1GiB")  # storages below 1 MiB are not offloaded
    for _ in range(2):
        model(make_inputs() * 1.0).backward()
    assert not handle.planned.plan.actions


class Stateful(Block):
    calls: ClassVar[list[torch.Tensor]] = []

    def __init__(self, kind):
        super().__init__()
        self.kind, self.generator = kind, torch.Generator().manual_seed(3)

    def forward(self, x):
        if self.kind == "generator":
            x = x + torch.rand(x.shape, generator=self.generator)
        elif self.kind == "calls":
            Stateful.calls.append(x)
        else:
            x = x * float(np.random.rand())
        return super().forward(x)


@pytest.mark.parametrize("kind", ["generator", "calls", "random numbers of Python or NumPy"])
def test_layers_that_change_state_do_not_run_again(kind):
    states = []
    for memory in (None, "1GiB"):
        Stateful.calls.clear()
        np.random.seed(0)
        model = make_net(layers=0)
        model.layers.extend(Stateful(kind) for _ in range(3))
        if memory is not None:
            fgoffload.offload(model, memory=memory, config=ALL)
        loss = model(make_inputs() * 1.0)
        loss.backward()
        layer = model.layers[0]
        states.append([loss.item(), len(Stateful.calls), np.random.rand(), layer.generator.get_state().tolist()])
    assert states[0] == states[1]
    with pytest.raises(fgoffload.ConfigError, match=f"no layer of Net could be measured: it .*{kind}"):
        model(make_inputs())


class Watching(Net):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.layers[1].mlp.register_forward_hook(lambda module, inputs, output: self.seen.append(output))

    def forward(self, x):
        self.seen.clear()
        return super().forward(x) + sum(one.square().sum() for one in self.seen)


class Pair(nn.Linear):
    def forward(self, query, key):  # like `MultiheadAttention`, which projects differently for self-attention
        return super().forward(query if query is key else query * 2)


class Pairing(nn.Sequential):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Pair(64, 64)

        def forward(self, x):
            x = x.sin()
            return self.mlp(x, key=x)

    def __init__(self):
        super().__init__(*(self.Layer() for _ in range(3)))


class Skipping(Net):
    step = 0

    def forward(self, x):
        self.step += 1
        for layer in self.layers[:2] if self.step == 1 else self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Watching, Pairing, Skipping])
def test_hooks_repeated_arguments_and_skipped_layers_are_bitwise_identical(kind):
    found = []
    for memory in (None, "1GiB"):
        torch.manual_seed(0)
        model = kind()
        handle = None if memory is None else fgoffload.offload(model, memory=memory, config=ALL)
        for step in range(6):
            model(make_inputs(step).view(2, 16, 64) * 1.0).square().mean().backward()
            if step == 2 and handle is not None:
                sites = [Site(chunk=0, layer=layer, tag="mlp") for layer in range(3)]
                handle.planned.plan = dataclasses.replace(handle.planned.plan, actions=dict.fromkeys(sites, Action.RECOMPUTE))
        found.append(copy_gradients(model))
    check_equal(*found)
    assert ("layer 2 (did not run)" in handle.explain()) == ("cannot be recomputed" in handle.explain()) == (kind is Skipping)


def test_processes_may_save_different_storages_or_skip_a_layer():
    def make(*storages, seconds=1.0):
        return MeasuredBlock("Block", Measured(forward_s=seconds), {"mlp": Measured(input=1)}, list(storages))

    norm, small, large = (4, ("norm",)), (8, ("mlp",)), (16, ("mlp",))
    ranks = [make(norm, small), make()], [make(norm, large, small), make(seconds=0.0)]
    merged, skipped = merge_blocks(ranks)
    assert merged.storages == [norm, large, small]
    assert not skipped.is_measured


def test_a_model_whose_output_is_never_used_in_backward_is_reported(caplog):
    model = make_net()
    fgoffload.offload(model, memory="1GiB", config=ALL)
    for _ in range(6):
        model(make_inputs())
    assert caplog.text.count("has no plan after 3 steps, since no backward reached a tensor") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "auto", "device": "cpu"}, "memory 'auto' needs a CUDA GPU, but the device is cpu"),
        ({"memory": "1GiB", "memory_reserve": "1GiB"}, "memory_reserve '1GiB' has no effect with memory '1GiB'"),
        ({"memory_reserve": "1GiB"}, "memory_reserve '1GiB' has no effect with memory None"),
    ],
)
def test_invalid_budget_arguments_are_refused_immediately(options, message):
    with pytest.raises(fgoffload.ConfigError, match=message):
        fgoffload.offload(make_net(), **options)


def test_a_closed_handle_cannot_be_entered():
    handle = fgoffload.offload(make_net(), ["layers.*"])
    handle.close()
    with pytest.raises(fgoffload.StateError, match=r"was removed\. Call `fgoffload\.offload` again"), handle:
        pass


WATCHED = []


class Watched(Block):
    def forward(self, x):
        WATCHED.append(has_hooks())
        return super().forward(x)


def test_kept_layers_run_without_hooks():
    model = Net(layers=0)
    model.layers.extend(Watched() for _ in range(3))
    fgoffload.offload(model, memory="1GiB", config=ALL)
    found = []
    for _ in range(6):  # the CPU's ledger needs the hooks in compared steps, the first three of a plan
        model(make_inputs() * 1.0).backward()
        found.append(WATCHED[-1])
    assert found[1:] == [True, True, True, False, False]


def test_groups_are_reloaded_while_backward_is_in_kept_layers():
    model, found = make_net(), []
    handle = fgoffload.offload(model, memory="1GiB", config=ALL)
    for _ in range(6):
        model(make_inputs() * 1.0).backward()
    plan = OffloadPlan(actions={Site(chunk=0, layer=0, tag="mlp"): Action.OFFLOAD})
    handle.planned.plan = dataclasses.replace(handle.planned.plan, actions=plan.actions)
    handle.stats()

    def note_reloads(module, inputs, output):
        output.register_hook(lambda _: found.append(handle.engine.read_tags()["mlp"].h2d_bytes > 0))

    model.layers[0].register_forward_hook(note_reloads)
    model(make_inputs() * 1.0).backward()
    assert found == [True]


def test_plans_are_replaced_until_the_next_one_is_slower(monkeypatch):
    plans = [OffloadPlan(actions={Site(chunk=0, layer=layer, tag="mlp"): Action.OFFLOAD}) for layer in range(3)]
    measured_s, waiting = [3.0, 2.0, 2.5], iter(plans)

    def solve(planner):
        return BudgetPlan(plan=next(waiting), peak_bytes=1 << 20, step_s=1.0, blocks=planner._blocks)

    def fit(planner, plan, reading):
        return 1 << 20, measured_s[plans.index(plan)] if plan in plans else 0.0

    monkeypatch.setattr(Planner, "solve", solve)
    monkeypatch.setattr(Planner, "fit", fit)
    model = make_net()
    handle = fgoffload.offload(model, memory="1GiB", config=ALL)
    found = []
    for _ in range(45):
        model(make_inputs() * 1.0).backward()
        if handle.planned is not None and (not found or found[-1] is not handle.planned.plan):
            found.append(handle.planned.plan)
    assert found == [*plans, plans[1]]
    assert handle.planned.measured.step_s > 0  # measured before, so not again


def test_a_plan_counts_the_cpu_time_of_each_offloaded_group_and_tensor():
    link = LinkModel(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12, duplex_bytes_per_s=1e12)
    times = {"attn": Measured(forward_s=0.01, backward_s=0.02), "mlp": Measured(forward_s=0.01, backward_s=0.02)}
    layer = MeasuredBlock("Block", Measured(forward_s=0.02, backward_s=0.04), times, [(1 << 20, (tag,)) for tag in times])
    planner = Planner([layer] * 3, link=link, policy=TransferPolicy(), budget_bytes=1 << 30, config=ALL)
    sites = [Site(chunk=0, layer=layer, tag=tag) for layer in range(2) for tag in times]
    one, all_four = (
        planner.fit(OffloadPlan(actions=dict.fromkeys(offloaded, Action.OFFLOAD)), StepReading(1 << 30))[1]
        for offloaded in (sites[:1], sites)
    )
    assert all_four - one == pytest.approx(3 * 2e-4 + 3 * 1e-4, rel=0.05)
