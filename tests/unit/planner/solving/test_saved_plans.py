"""Compares plans with saved ones: a plan fits its budget, is at most 0.5% slower, and no slower than a baseline that fits.

`saved_plans.json` has the plans of an earlier search: the command, and the layers of each chunk by action and tag. Its `step_s`
and `peak_bytes` are the predictions of that time; the tests simulate the saved plan again.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from fgoffload import Action, OffloadPlan, Site
from fgoffload.cli.plan_device import choose_host_budget
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model_file
from fgoffload.planner import build_ranks, get_hardware
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.solver import solve
from fgoffload.planner.timing.profile import Profile
from fgoffload.units import parse_bytes

ROOT = Path(__file__).parents[4]
SAVED = json.loads((Path(__file__).parent / "saved_plans.json").read_text())


def build(command):
    """Return the ranks and the budget of a `fgoffload plan` command, whose second argument is `--gpu` or `--profile`."""
    path, device, name, _, budget, *flags = command
    model, parallelism = read_model_file(ROOT / path, typed=flags)
    assumptions = read_assumptions(read_argument_file(ROOT / path), source=path, typed=flags, has_optimizer=device == "--gpu")
    if device == "--gpu":
        hardware = get_hardware(name)
        host_bytes, _ = choose_host_budget(None, hardware, parallelism.world_size)
        ranks = build_ranks(model, parallelism, hardware, assumptions=assumptions)
        ranks = [dataclasses.replace(rank, host_budget_bytes=host_bytes) for rank in ranks]
    else:
        ranks = make_rank_models(Profile.load(ROOT / name), policy=assumptions.policy)
    return ranks, parse_bytes(budget, name="budget")


def list_layers(ranges):
    for part in ranges.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def make_plan(saved):
    actions = {
        Site(chunk=int(chunk), layer=layer, tag=tag): Action(action)
        for action, tags in saved["actions"].items()
        for tag, chunks in tags.items()
        for chunk, ranges in chunks.items()
        for layer in list_layers(ranges)
    }
    return OffloadPlan(actions=actions, loss_window_bytes=saved["loss_window_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: " ".join(saved["command"]).replace("arguments/", ""))
def test_plans_fit_and_are_as_fast_as_saved_plans_and_baselines(saved):
    ranks, budget_bytes = build(saved["command"])
    before, found = simulate(ranks, make_plan(saved)), solve(ranks, budget_bytes=budget_bytes)
    fitting = [one.step_s for one in found.baselines.values() if one.peak_bytes <= budget_bytes]
    assert found.result.peak_bytes <= budget_bytes
    assert found.result.step_s <= 1.005 * before.step_s
    assert found.result.step_s <= min(fitting, default=found.result.step_s)
