"""Plans the models of `arguments/` for three GPUs, with a budget halfway between the baseline and full recompute.

    python examples/benchmarks/plan_models.py [--models llama3_8b ...] [--gpus h100 h200 gb200]

For each model and GPU, the script predicts the memory of the fullest rank and the step time for the baseline, full recompute
and the plan. It needs no GPU itself. Large models take several seconds.

Expected output: a Markdown table for arguments/README.md, with a row for each model and GPU.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.flags.model_shapes import read_model_file
from fgoffload.planner import build_ranks, get_hardware
from fgoffload.planner.entry import plan_ranks
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import list_baselines
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[2] / "arguments"
MODELS = (
    "deepseek_v3",
    "deepseek_v2_lite",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "mixtral_8x7b",
    "kimi_k2",
    "gpt_oss_120b",
    "llama3_8b",
    "llama3_70b",
)
GPUS = ("h100", "h200", "gb200")
HEADINGS = ("model", "GPU", "baseline", "full recompute", "plan for the halfway budget", "host memory, GiB per rank")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    for model in arguments.models:
        for gpu in arguments.gpus:
            print(f"| {' | '.join(list_cells(model, gpu))} |", flush=True)


def list_cells(model: str, gpu: str) -> Iterator[str]:
    """Yield the cells of the row for one model and GPU."""
    hardware = get_hardware(gpu)
    shape, parallelism = read_model_file(ARGUMENTS / f"{model}.sh")
    ranks = build_ranks(shape, parallelism, hardware)
    results = {name: simulate(one.adapt(ranks), one.make_plan(ranks)) for name, one in list_baselines(ranks).items()}
    baseline, full = results["baseline"], results["full recompute"]
    yield f"`{model}`"
    yield gpu.upper()
    fits = "" if baseline.peak_bytes <= hardware.device_memory_bytes else ", does not fit"
    yield f"{baseline.peak_bytes / GIB:.1f} GiB{fits}, {baseline.step_s:.2f} s"
    yield f"{full.peak_bytes / GIB:.1f} GiB, {full.step_s / baseline.step_s - 1:+.1%}"
    try:
        found = plan_ranks(ranks, budget_bytes=(baseline.peak_bytes + full.peak_bytes) // 2).solution.result
    except PlanError as error:
        yield str(error)
        yield "-"
        return
    yield f"{found.peak_bytes / GIB:.1f} GiB, {found.step_s / baseline.step_s - 1:+.1%}"
    yield f"{max(rank.host_peak_bytes for rank in found.ranks) / GIB:.1f}"


if __name__ == "__main__":
    main()
