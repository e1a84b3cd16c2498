"""What the planner predicts beside what a GPU measures: three models, six settings each, from the table and from a profile.

    python examples/benchmarks/check_predictions.py --out predictions [--minutes 8] [--steps 4] [ARGUMENTS.sh ...]

Runs `fgoffload bench ... --profile` on one model after the other, by default the reference workload, one with latent attention
and a dense one. Each may take an equal part of the minutes that are left; what was measured when they are over counts. Needs
one GPU of 80 GB and Transformer Engine; with arguments/tiny_moe.sh it runs anywhere, and says nothing.

What you should see: a line for each model, then a table, the worst prediction first, and a line with the worst of each source
against its limits. `--out` has the table as `predictions.md` and all else as `predictions.tar.gz`.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fgoffload.benchmark.prediction import Source
from fgoffload.units import format_bytes

ARGUMENTS = Path(__file__).parents[2] / "arguments"
HEADINGS = (
    "model",
    "setting",
    "step ms",
    *(f"step by {source.value}" for source in Source),
    "peak",
    *(f"peak by {source.value}" for source in Source),
)
"""Of the table: step times in ms, then peaks; a prediction has its error behind it."""

LOG_LINES = 15
"""Of a benchmark's output, where it left nothing to compare."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What is run of a model."""

    settings: tuple[str, ...]
    """Beside `nothing`, in the order in which they run: first those that say most, since a model's time can end too early."""
    budgets: tuple[str, ...] = ()
    """Four fifths and a quarter of the way from the predicted peak of `nothing` to that of full recompute, on an H200. They run
    behind the settings, since each is planned first, and the one first of which more is moved and run again."""
    flags: tuple[str, ...] = ()
    """Megatron's."""


FOUR_SEQUENCES = ("--moe-permute-fusion", "--micro-batch-size", "4", "--global-batch-size", "16")
"""With two, forward of such layers takes a slow host longer than the device, and the step is the host's."""

MODELS = {
    "w2_moe": Model(
        ("ours:core_attn+attn_proj+expert_fc1", "recompute:full", "recompute:layernorm+moe_act"),
        ("19.1GiB", "25.6GiB"),
        FOUR_SEQUENCES,
    ),
    "mla_moe": Model(
        ("ours:core_attn+attn_proj+expert_fc1", "recompute:full", "recompute:layernorm+moe_act"),
        ("23.0GiB", "31.7GiB"),
        FOUR_SEQUENCES,
    ),
    "llama3_8b_layers": Model(("ours:core_attn+attn_proj", "recompute:full", "recompute:core_attn"), ("40.5GiB", "55.9GiB")),
}
"""By the name of the argument file."""

ANY_OTHER = Model(("ours:core_attn+attn_proj", "recompute:full", "recompute:core_attn"))


def make_command(path: Path, folder: Path, *, steps: int, warmup: int) -> list[str]:
    """Return the command that benchmarks one model."""
    model = MODELS.get(path.stem, ANY_OTHER)
    command = [sys.executable, "-m", "fgoffload", "bench", str(path), *model.flags, "--profile", "--out", str(folder)]
    command += ["--settings", "nothing", *model.settings, "--steps", str(steps), "--warmup", str(warmup)]
    return [*command, "--budgets", *model.budgets] if model.budgets else command


def run(command: Sequence[str], log: Path, *, seconds: float) -> str:
    """Run `command` for so long at most, with its output in `log`, and return how it ended."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        # A session of its own, so that the end of the time ends the processes that the benchmark has started too.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=max(1.0, seconds))
            end = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = "stopped, since its time was over"
    return f"{time.monotonic() - began:.0f} s, {end}"


def read_run(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the comparisons that a benchmark has written, and a line for each setting that failed."""
    try:
        document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [], []
    failed = [f"{folder.name}, {one['setting']}: {one['failure']}" for one in document["runs"] if one["failure"]]
    return [{"model": folder.name, **one} for one in document["predictions"]], failed


def list_rows(comparisons: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of each setting of each model, under `HEADINGS`, the worst first."""
    found: dict[tuple[str, str], dict[Source, dict[str, Any]]] = {}
    for one in comparisons:
        found.setdefault((one["model"], one["setting"]), {})[Source(one["source"])] = one
    ordered = sorted(found.items(), key=lambda item: max(map(find_badness, item[1].values())), reverse=True)
    return [(*names, *_list_cells(by_source)) for names, by_source in ordered]


def find_badness(one: dict[str, Any]) -> float:
    """Return the larger of both errors in parts of its limit."""
    limits = Source(one["source"]).limits
    return max(abs(one["step_error_percent"]) / limits.step, abs(one["peak_error_percent"] or 0) / limits.peak) / 100


def describe_worst(source: Source, comparisons: Iterable[dict[str, Any]]) -> str:
    """Return one line: the largest errors of one source over all models, against its limits."""
    own = [one for one in comparisons if one["source"] == source.value]
    if not own:
        return f"predicted {source.title}: nothing"
    parts = []
    for what, name, limit in (("step time", "step", source.limits.step), ("peak", "peak", source.limits.peak)):
        known = [one for one in own if one[f"{name}_error_percent"] is not None]
        if known:
            worst = max(known, key=lambda one: abs(one[f"{name}_error_percent"]))
            error = worst[f"{name}_error_percent"]
            kept = "within" if abs(error) <= 100 * limit else "ABOVE"
            parts.append(f"{what} {error:+.1f}% ({worst['model']}, {worst['setting']}), {kept} {limit:.0%}")
    return f"predicted {source.title}, {len(own)} comparisons, worst: {'; '.join(parts)}"


def write_report(folder: Path, work: Path, rows: Sequence[tuple[str, ...]], lines: Iterable[str]) -> None:
    """Write the table as a page, and everything else into one file beside it."""
    table = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows)]
    (folder / "predictions.md").write_text("\n".join((*lines, "", *table, "")), encoding="utf-8")
    with tarfile.open(folder / "predictions.tar.gz", "w:gz") as archive:
        archive.add(work, arcname="predictions")


def main() -> int:
    """Run all models and show the table; 1 where a model left nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", metavar="ARGUMENTS.sh", nargs="*", type=Path)
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("predictions"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    files = options.files or [ARGUMENTS / f"{name}.sh" for name in MODELS]
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.width = max(console.width, 160)
    deadline = time.monotonic() + 60 * options.minutes
    comparisons: list[dict[str, Any]] = []
    notes: list[str] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="fgoffload-") as name:
        work = Path(name)
        for number, path in enumerate(files):
            folder, log = work / path.stem, work / f"{path.stem}.txt"
            seconds = (deadline - time.monotonic()) / (len(files) - number)
            command = make_command(path, folder, steps=options.steps, warmup=options.warmup)
            end = run(command, log, seconds=seconds)
            found, failed = read_run(folder)
            console.print(f"{path.stem}: {end}, {len(found)} comparisons", highlight=False, markup=False)
            comparisons += found
            notes += failed
            if not found:
                code = 1
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                console.print("\n".join(tail), highlight=False, markup=False, soft_wrap=True)
            lines = [*(describe_worst(source, comparisons) for source in Source), *notes]
            # After each model, so that an end from outside costs the model that runs alone.
            write_report(options.out, work, list_rows(comparisons), lines)
    table = Table(*HEADINGS, title="predicted beside measured, worst first", title_justify="left")
    for cells in list_rows(comparisons):
        table.add_row(*cells)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return code


def _list_cells(by_source: dict[Source, dict[str, Any]]) -> list[str]:
    one = next(iter(by_source.values()))
    peak_bytes = one["measured_peak_bytes"]
    cells = [f"{1e3 * one['measured_step_s']:.1f}"]
    for source in Source:
        own = by_source.get(source)
        cells.append("-" if own is None else f"{1e3 * own['predicted_step_s']:.1f} {own['step_error_percent']:+.1f}%")
    cells.append("-" if peak_bytes is None else format_bytes(peak_bytes))
    for source in Source:
        own = by_source.get(source)
        is_known = own is not None and own["peak_error_percent"] is not None
        cells.append(f"{format_bytes(own['predicted_peak_bytes'])} {own['peak_error_percent']:+.1f}%" if is_known else "-")
    return cells


if __name__ == "__main__":
    sys.exit(main())
