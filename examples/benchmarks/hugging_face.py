"""Compares offload and checkpointing of Hugging Face models under FSDP2, with all settings in one process.

    python examples/benchmarks/hugging_face.py [--workload dense] [--settings baseline offload ...] [--layers 12]
        [--budgets 26GiB 22GiB 18GiB 15.1GiB] [--steps 8] [--out FILE.json]
    python examples/benchmarks/hugging_face.py --draw FILE.csv --out PICTURE.png

`dense` has layers of Qwen2.5-7B's size (hidden 3584, FFN 18944) and two sequences of 4096 tokens. `moe` has layers as in
Qwen3-30B (hidden 2048, 64 experts of 768, 8 per token) and one sequence of 8192. Weights are random, in bf16. verl and TRL run
only on a GPU, and only if `verl.utils.activation_offload` and `trl.models.activation_offloading` can be imported.

Expected output: a row for each setting with the median step time, its ratio to the first setting, the peak allocated memory,
the GiB offloaded per step, and whether loss and gradients with deterministic kernels are bitwise identical to the first
setting's. `over link` is the step time divided by a lower bound, which is the sum of a bound for forward and a bound for
backward. Each of these bounds is the larger of two times: the duration of the pass in the first setting, and the duration of
the pass's copies at the link rate of the same run. `--budgets` adds settings with a memory budget. The script then also prints
each plan and its predictions. A plan settles after 15 to 70 steps. If a setting fails, its row shows the error. The script
prints all rows again at the end, and writes them to `--out`, or else to a file in the folder `$OUT` if that variable is set.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import gc
import hashlib
import importlib.util
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set before CUDA starts, for deterministic steps

import torch
import torch.distributed as dist
import transformers
from rivals import checkpointing, save_on_cpu, trl, verl
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import fgoffload
from fgoffload.integrations.fsdp import enable_activation_offloading
from fgoffload.units import GIB, MIB

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
MOE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 32000,
    "experts_implementation": "grouped_mm",
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32}
TINY |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 128}
WORKLOADS = {  # model class, config class, sizes, number of layers, and (sequences, tokens per sequence)
    "dense": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, DENSE, 12, (2, 4096)),
    "moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, MOE, 8, (1, 8192)),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Row:
    """Result of one setting. The predictions are those of the settled plan."""

    setting: str
    step_ms: float | None = None
    over_baseline: float | None = None
    predicted_step_ms: float | None = None
    peak_gib: float | None = None
    predicted_peak_gib: float | None = None
    offloaded_gib: float | None = None
    over_link: float | None = None
    digest: str = ""
    is_bitwise_identical: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.setting:32s} {self.error.splitlines()[0][:90]}"
        numbers = (
            (self.step_ms, 8, 1),
            (self.over_baseline, 6, 3),
            (self.predicted_step_ms, 9, 1),
            (self.peak_gib, 9, 2),
            (self.predicted_peak_gib, 9, 2),
            (self.offloaded_gib, 9, 2),
            (self.over_link, 9, 3),
        )
        cells = " ".join(f"{'-':>{width}s}" if one is None else f"{one:{width}.{digits}f}" for one, width, digits in numbers)
        return f"{self.setting:32s} {cells}  {'yes' if self.is_bitwise_identical else 'NO':7s} {self.digest[:8]}"


HEADER = f"{'setting':32s}  step ms  ratio predicted  peak GiB predicted offloaded over link  bitwise digest"


@dataclasses.dataclass(slots=True)
class Baseline:
    """Result of the first setting, with which all later settings are compared."""

    step_s: float
    forward_s: float
    digest: str


@contextlib.contextmanager
def offload(model: torch.nn.Module, *, patterns: tuple[str, ...] = (), enable_ckpt: bool = False) -> Iterator[object]:
    """Offload the model's layers, or the modules that match `patterns`, with default transfer settings."""
    handle = fgoffload.offload(model, patterns) if patterns else enable_activation_offloading(model, "fsdp2", enable_ckpt)
    with handle:
        yield handle


@contextlib.contextmanager
def plan(model: torch.nn.Module, budget: str) -> Iterator[object]:
    """Offload and recompute according to a plan for a memory budget, and print the plan."""
    with fgoffload.offload(model, memory=budget) as handle:
        yield handle
        print(fgoffload.explain(handle))


SETTINGS: dict[str, Callable[[torch.nn.Module], contextlib.AbstractContextManager[object]]] = {
    "baseline": lambda model: contextlib.nullcontext(),
    "checkpointing": checkpointing,
    "offload": offload,
    "offload attention": lambda model: offload(model, patterns=("model.layers.*.self_attn",)),
    "checkpointing, inputs offloaded": lambda model: offload(model, enable_ckpt=True),
    "verl": verl,
    "verl with checkpointing": lambda model: verl(model, enable_ckpt=True),
    "trl": trl,
    "trl with checkpointing": lambda model: trl(model, enable_ckpt=True),
    "save_on_cpu": save_on_cpu,
}
MAX_WARMUP_STEPS = 120
"""Maximum number of untimed steps, even if the plan has not settled."""
MAX_RATIO = 1.5
PACKAGES = {"verl": "verl.utils.activation_offload", "trl": "trl.models.activation_offloading"}


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    """Return a model with random weights whose layers are FSDP units on a single rank."""
    model_class, config_class, sizes, layers, _ = WORKLOADS[options.workload]
    sizes = sizes | {name: size for name, size in TINY.items() if name in sizes} if options.smoke else sizes
    config = config_class(num_hidden_layers=options.layers or layers, use_cache=False, **sizes)
    torch.manual_seed(0)
    with DEVICE:
        model = model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")  # noqa: SLF001
    mesh = dist.init_device_mesh(DEVICE.type, (1,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model.train()


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def run_step(model: torch.nn.Module, tokens: torch.Tensor, microbatches: int) -> torch.Tensor:
    """Run a step, wait for the device, and return the loss of the last microbatch."""
    model.zero_grad()
    for _ in range(microbatches):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    synchronize()
    return loss.detach()


def find_digest(model: torch.nn.Module, tokens: torch.Tensor) -> str:
    """Return a digest of the loss and gradients of one microbatch with deterministic kernels."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # cuDNN's attention is not deterministic
            loss = run_step(model, tokens, 1)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    def find_one(tensor: torch.Tensor) -> bytes:
        return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).digest()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(find_one, [loss, *(parameter.grad.to_local() for parameter in model.parameters())])
    return hashlib.sha256(b"".join(digests)).hexdigest()


def measure_rates() -> tuple[float, float]:
    """Return the link's bytes per second to the host and to the device, measured separately with large copies."""
    device, host = (torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    host = torch.empty_like(device, device="cpu", pin_memory=DEVICE.type == "cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(5):
            synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize()
            seconds.append(time.perf_counter() - begin)
        rates.append(device.nbytes / min(seconds))
    return rates[0], rates[1]


def measure_forward(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Return the seconds of the fastest of three forward passes under autograd."""
    seconds = []
    for _ in range(3):
        synchronize()
        begin = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        synchronize()
        seconds.append(time.perf_counter() - begin)
        loss.backward()  # ends the step for FSDP
    return min(seconds)


def measure(
    name: str, options: argparse.Namespace, baseline: Baseline | None, rates: tuple[float, float]
) -> tuple[Row, Baseline]:
    """Return the row of a setting, and the baseline. This setting is the baseline if `baseline` is None."""
    model = make_model(options)
    *_, (sequences, tokens_each) = WORKLOADS[options.workload]
    shape = (2, 32) if options.smoke else (sequences, tokens_each)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    row = Row(setting=name)
    with SETTINGS[name](model) as handle:
        warm_up(model, tokens, options, handle, row)
        seconds, moved, peaks = [], (0, 0), [0]
        for _ in range(options.steps):
            gc.collect()
            synchronize()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # in each step: measurements for a budget also reset it
            begin = time.perf_counter()
            run_step(model, tokens, options.microbatches)
            seconds.append(time.perf_counter() - begin)
            if DEVICE.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated())
            if hasattr(handle, "stats"):
                stats = handle.stats()
                moved = stats.d2h_bytes, stats.h2d_bytes
        row.peak_gib = max(peaks) / GIB
        step_s = statistics.median(seconds)
        row.digest = find_digest(model, tokens)
        if baseline is None:
            baseline = Baseline(step_s=step_s, forward_s=measure_forward(model, tokens), digest=row.digest)
            # Compute the digest twice, to check that the baseline itself is reproducible.
            row.digest = find_digest(model, tokens)
    forward_s = baseline.forward_s * options.microbatches
    bound_s = max(forward_s, moved[0] / rates[0]) + max(baseline.step_s - forward_s, moved[1] / rates[1])
    row.step_ms, row.over_baseline = 1e3 * step_s, step_s / baseline.step_s
    row.offloaded_gib, row.over_link = moved[0] / GIB, step_s / bound_s if moved[0] else None
    row.is_bitwise_identical = row.digest == baseline.digest
    return row, baseline


def warm_up(model: torch.nn.Module, tokens: torch.Tensor, options: argparse.Namespace, handle: object, row: Row) -> None:
    """Run the untimed steps, and record the predictions of the settled plan."""
    for step in range(MAX_WARMUP_STEPS):
        planned = getattr(handle, "planned", None)
        is_settled = planned is not None and planned.measured is not None and planned.measured.step_s > 0
        if step >= options.warmup and (is_settled or not row.setting.startswith("budget")):
            break
        run_step(model, tokens, options.microbatches)
    if planned is not None:
        row.predicted_step_ms, row.predicted_peak_gib = 1e3 * planned.step_s, planned.peak_bytes / GIB


def draw(source: Path, picture: Path) -> None:
    """Plot peak memory against step time for the settings in `source`. The legend gives ratios above `MAX_RATIO`."""
    from matplotlib.figure import Figure

    with source.open(encoding="utf-8") as stream:
        rows = [(row["setting"], float(row["over_baseline"]), float(row["peak_gib"])) for row in csv.DictReader(stream)]
    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.subplots()
    planned = sorted((peak, ratio) for name, ratio, peak in rows if name.startswith("budget"))
    axes.plot(*zip(*planned, strict=True), marker="o", color="#1f77b4", label="fgoffload, by memory budget")
    for name, ratio, peak in rows:
        if not name.startswith("budget"):
            shown = name if ratio <= MAX_RATIO else f"{name}: {ratio:.1f} at {peak:.1f} GiB"
            axes.plot(peak, min(ratio, MAX_RATIO), linestyle="none", marker="s" if ratio <= MAX_RATIO else "^", label=shown)
    axes.set_ylim(0.98, MAX_RATIO)
    axes.set_xlabel("peak memory, GiB")
    axes.set_ylabel("step time over baseline")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--workload", choices=WORKLOADS, default="dense")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS)
    )
    parser.add_argument("--budgets", nargs="+", default=[], metavar="SIZE", help="memory budgets to plan for")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the workload's own")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--microbatches", type=int, default=1, help="microbatches per step, with accumulated gradients")
    parser.add_argument("--warmup", type=int, default=40, help="untimed steps; a hot GPU is up to 2%% slower than a cold one")
    parser.add_argument("--smoke", action="store_true", help="use a tiny model, to test the script with or without a GPU")
    parser.add_argument("--draw", type=Path, metavar="FILE.csv", help="plot this file to --out without measuring")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is below 1.")
    if options.out is None and "OUT" in os.environ:
        options.out = Path(os.environ["OUT"], f"hugging_face_{options.workload}.json")
    return options


def can_run(name: str) -> bool:
    """Return whether the package of a setting, and the GPU that the package needs, are available."""
    module = PACKAGES.get(name.split()[0])
    try:
        return module is None or (DEVICE.type == "cuda" and importlib.util.find_spec(module) is not None)
    except ModuleNotFoundError:
        return False


def try_to_measure(
    name: str, options: argparse.Namespace, baseline: Baseline | None, rates: tuple[float, float]
) -> tuple[Row, Baseline | None]:
    """Measure a setting. If it fails, return a row with the error."""
    if not can_run(name):
        return Row(setting=name, error=f"skipped: needs a GPU and {PACKAGES[name.split()[0]]}"), baseline
    try:
        return measure(name, options, baseline, rates)
    except Exception as error:  # noqa: BLE001 - the row shows any error of an alternative or a budget
        traceback.print_exc(limit=-6)
        return Row(setting=name, error=f"{type(error).__name__}: {error}"), baseline


def main() -> int:
    """Measure, print and write the rows."""
    options = parse_options()
    if options.draw is not None:
        draw(options.draw, options.out or options.draw.with_suffix(".png"))
        return 0
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    rates = measure_rates()
    print(HEADER, flush=True)
    rows: list[Row] = []
    baseline = None
    SETTINGS.update({f"budget {one}": functools.partial(plan, budget=one) for one in options.budgets})
    for name in [*options.settings, *(f"budget {one}" for one in options.budgets)]:
        row, baseline = try_to_measure(name, options, baseline, rates)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        print(row, flush=True)
        rows.append(row)
        if options.out is not None:  # after each row, so that an interrupted run keeps its rows
            options.out.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1), encoding="utf-8")
        if baseline is None:
            break  # without a baseline, the ratios of all other settings are undefined
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"\n{options.workload} on {device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"link: {rates[0] / 1e9:.1f} GB/s to the host, {rates[1] / 1e9:.1f} to the device")
    print(HEADER, *rows, sep="\n")
    dist.destroy_process_group()
    return 0 if all(row.is_bitwise_identical or row.error.startswith("skipped") for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
