"""Compares predictions from the hardware table with published steps; `published_steps.json` has settings and sources."""

import itertools
import json
from pathlib import Path

from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model_file
from fgoffload.planner import build_ranks, get_hardware
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FULL_RECOMPUTE, MegatronFlags, SelectiveRecompute

ROWS = json.loads(Path(__file__).with_name("published_steps.json").read_text(encoding="utf-8"))
ARGUMENTS = Path(__file__).parents[4] / "arguments"


def predict(row):
    path, typed = ARGUMENTS / f"{row['file']}.sh", row["flags"].split()
    model, parallelism = read_model_file(path, typed=typed)
    assumptions = read_assumptions(read_argument_file(path), source="row", typed=typed)
    ranks = build_ranks(model, parallelism, get_hardware(row["gpu"]), assumptions=assumptions)
    flags = FULL_RECOMPUTE
    if row["recompute"] != "full":
        modules = tuple(row["recompute"].split())
        flags = MegatronFlags(recompute=SelectiveRecompute(modules=modules) if modules else None)
    ranks = flags.adapt(ranks)
    return simulate(ranks, flags.make_plan(ranks)).step_s


def test_predicted_steps_match_published_ones():
    steps = {row["name"]: predict(row) for row in ROWS}
    errors = {"first": [], "more": []}
    for row in ROWS:
        errors[row["group"]].append(abs(steps[row["name"]] / row["published_s"] - 1))
    first, more = errors.values()
    assert (sum(error <= 0.15 for error in first), len(first)) >= (16, 18)
    assert (sum(error <= 0.15 for error in more), len(more)) >= (14, 16)
    assert max(first) <= 0.30
    assert max(more) <= 0.30
    for one, other in itertools.combinations(ROWS, 2):
        if (one["file"], one["gpu"]) == (other["file"], other["gpu"]) and abs(ratio(one, other) - 1) > 0.15:
            assert (ratio(one, other) > 1) == (steps[one["name"]] > steps[other["name"]]), (one["name"], other["name"])


def ratio(one, other):
    return one["published_s"] / other["published_s"]
