"""Predicted steps beside published ones, by the hardware table: `published_steps.json` has settings, seconds and sources."""

import json
from pathlib import Path

from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions, read_model_file
from fgoffload.planner import build_ranks, get_hardware
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FULL_RECOMPUTE, MegatronFlags, SelectiveRecompute

ROWS = json.loads(Path(__file__).with_name("published_steps.json").read_text(encoding="utf-8"))
ARGUMENTS = Path(__file__).parents[4] / "arguments"
RANKED = {  # faster, slower: layouts of one model on one device
    "GPT-OSS 120B, 64 B200, bf16, EP8": "GPT-OSS 120B, 64 B200, bf16, EP64",
    "Qwen3-235B, 256 H100, bf16, EP32, DeepEP": "Qwen3-235B, 256 H100, bf16, EP8, all-to-all",
}


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


def test_steps_are_predicted_as_published():
    steps = {row["name"]: predict(row) for row in ROWS}
    errors = {held_out: [] for held_out in (False, True)}
    for row in ROWS:
        errors[row["held_out"]].append(abs(steps[row["name"]] / row["published_s"] - 1))
    fitted, held_out = errors[False], errors[True]
    assert (sum(error <= 0.15 for error in fitted), len(fitted)) >= (15, 18)
    assert (sum(error <= 0.15 for error in held_out), len(held_out)) >= (11, 16)
    assert max(fitted) <= 0.30
    assert max(held_out) <= 0.35
    assert all(steps[faster] < steps[slower] for faster, slower in RANKED.items())
