"""Compares predicted step times and memory peaks with GPU measurements, for three models with six settings each.

    python examples/benchmarks/check_predictions.py --out predictions [--minutes 8] [--steps 4] [ARGUMENTS.sh ...]

The script predicts once from the hardware table and once from a profile. It runs `fgoffload bench ... --profile` on one model
after another: by default the reference workload, a model with latent attention and a dense model. Each model gets an equal
share of the remaining minutes. If a model's time runs out, the script reports the results so far. It needs one GPU of 80 GB or
more, and Transformer Engine. With arguments/tiny_moe.sh, the script runs anywhere, but the results are meaningless.

Expected output: a line for each model, a table with the worst prediction first, and a line for each source of predictions with
its worst errors and their limits. `--out` receives the table in `predictions.md`, and all other files in `predictions.tar.gz`.
"""

import argparse
import csv
import dataclasses
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

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
"""Headings of the table: step times in ms, then memory peaks. Each prediction is followed by its error."""

LIMITS = {Source.TABLE: {"step": 8.0, "peak": 5.0}, Source.PROFILE: {"step": 4.0, "peak": 2.0}}
"""Accepted error of a prediction, in percent of the measurement, keyed by source and quantity."""

LOG_LINES = 15
"""Number of log lines to show if a benchmark yields no comparisons."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Settings to measure with one model, and flags to pass to the benchmark."""

    settings: tuple[str, ...]
    """Settings besides `baseline`, the most informative first, since a model's time can run out."""
    budgets: tuple[str, ...] = ()
    """Budgets 80% and 25% of the way from the predicted peak of `baseline` to that of full recompute, on an H200. They run
    after the settings, since each needs a plan first. The smaller budget runs first."""
    flags: tuple[str, ...] = ()


FOUR_SEQUENCES = ("--moe-permute-fusion", "--micro-batch-size", "4", "--global-batch-size", "16")
"""Flags for four sequences per microbatch. With two, the step is launch-bound on a slow host."""

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
"""Models, keyed by the name of their argument file."""

ANY_OTHER = Model(("ours:core_attn+attn_proj", "recompute:full", "recompute:core_attn"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measurement of one setting of a model, and its prediction from one source."""

    model: str
    setting: str
    source: Source
    measured_step_s: float
    predicted_step_s: float
    measured_peak_bytes: int
    """Measured peak; 0 if the peak was not measured."""
    predicted_peak_bytes: int

    @property
    def errors(self) -> dict[str, float]:
        """Errors in percent of the measurement, keyed by quantity. An error is positive if the prediction is too high."""
        errors = {"step": 100 * (self.predicted_step_s / self.measured_step_s - 1)}
        if self.measured_peak_bytes:
            errors["peak"] = 100 * (self.predicted_peak_bytes / self.measured_peak_bytes - 1)
        return errors

    @property
    def relative_error(self) -> float:
        """The larger of the two errors, each divided by its limit. The result exceeds 1 if an error exceeds its limit."""
        return max(abs(error) / LIMITS[self.source][name] for name, error in self.errors.items())


def make_command(path: Path, folder: Path, *, steps: int, warmup: int) -> list[str]:
    """Return the benchmark command for one model."""
    model = MODELS.get(path.stem, ANY_OTHER)
    command = [sys.executable, "-m", "fgoffload", "bench", str(path), *model.flags, "--profile", "--out", str(folder)]
    command += ["--settings", "baseline", *model.settings, "--steps", str(steps), "--warmup", str(warmup)]
    return [*command, "--budgets", *model.budgets] if model.budgets else command


def run(command: Sequence[str], log: Path, *, seconds: float) -> str:
    """Run `command` for at most `seconds` with its output in `log`. Describe its duration and how it ended."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        # Start a new session, so that a timeout also ends the processes that the benchmark started.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=max(1.0, seconds))
            end = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = "stopped at its time limit"
    return f"{time.monotonic() - began:.0f} s, {end}"


def read_run(folder: Path) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons from a benchmark's CSV file, and a line for each failed setting."""
    try:
        rows = list(csv.DictReader((folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    except OSError:
        return [], []
    failed = [f"{folder.name}, {row['setting']}: {row['failure']}" for row in rows if row["failure"]]
    return [
        Comparison(
            model=folder.name,
            setting=row["setting"],
            source=source,
            measured_step_s=float(row["step_p50_s"]),
            predicted_step_s=float(row[f"{source.value}_step_s"]),
            measured_peak_bytes=int(row["peak_allocated_bytes"] or row["activation_peak_bytes"] or 0),
            predicted_peak_bytes=int(row[f"{source.value}_peak_bytes"]),
        )
        for row in rows
        for source in Source
        if row[f"{source.value}_step_s"]
    ], failed


def list_rows(comparisons: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """Return a row of cells under `HEADINGS` for each setting of each model, the worst prediction first."""
    found: dict[tuple[str, str], dict[Source, Comparison]] = {}
    for one in comparisons:
        found.setdefault((one.model, one.setting), {})[one.source] = one
    ordered = sorted(found.items(), key=lambda item: max(one.relative_error for one in item[1].values()), reverse=True)
    return [(*names, *_list_cells(by_source)) for names, by_source in ordered]


def describe_worst(source: Source, comparisons: Iterable[Comparison]) -> str:
    """Return a line that compares one source's largest errors over all models with their limits."""
    own = [one for one in comparisons if one.source is source]
    if not own:
        return f"predicted from the {source.value}: no comparisons"
    parts = []
    for name, limit in LIMITS[source].items():
        known = [one for one in own if name in one.errors]
        if known:
            worst = max(known, key=lambda one: abs(one.errors[name]))
            kept = "within" if abs(worst.errors[name]) <= limit else "ABOVE"
            parts.append(f"{name} {worst.errors[name]:+.1f}% ({worst.model}, {worst.setting}), {kept} {limit:.0f}%")
    return f"predicted from the {source.value}, {len(own)} comparisons, worst: {'; '.join(parts)}"


def write_report(folder: Path, work: Path, rows: Sequence[tuple[str, ...]], lines: Iterable[str]) -> None:
    """Write the table as Markdown, and archive the files of `work` next to it."""
    table = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows)]
    (folder / "predictions.md").write_text("\n".join((*lines, "", *table, "")), encoding="utf-8")
    with tarfile.open(folder / "predictions.tar.gz", "w:gz") as archive:
        archive.add(work, arcname="predictions")


def main() -> int:
    """Benchmark all models and print the table. Return 1 if a model has no comparisons."""
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
    comparisons: list[Comparison] = []
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
            # Write after each model, so that stopping the script loses only one model's results.
            write_report(options.out, work, list_rows(comparisons), lines)
    table = Table(*HEADINGS, title="predicted and measured, worst first", title_justify="left")
    for cells in list_rows(comparisons):
        table.add_row(*cells)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return code


def _list_cells(by_source: dict[Source, Comparison]) -> list[str]:
    one = next(iter(by_source.values()))
    cells = [f"{1e3 * one.measured_step_s:.1f}"]
    for source in Source:
        own = by_source.get(source)
        cells.append("-" if own is None else f"{1e3 * own.predicted_step_s:.1f} {own.errors['step']:+.1f}%")
    cells.append(format_bytes(one.measured_peak_bytes) if one.measured_peak_bytes else "-")
    for source in Source:
        own = by_source.get(source)
        is_known = own is not None and "peak" in own.errors
        cells.append(f"{format_bytes(own.predicted_peak_bytes)} {own.errors['peak']:+.1f}%" if is_known else "-")
    return cells


if __name__ == "__main__":
    sys.exit(main())
