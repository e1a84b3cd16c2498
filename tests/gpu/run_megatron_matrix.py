"""Runs the GPU column of the support matrix: trains each row twice without and once with offload, and compares bitwise.

    python tests/gpu/run_megatron_matrix.py [--jobs 6] [--gpus 1] [--only WORDS | --short] [--out FOLDER] [--megatron CHECKOUT]

Each row runs in separate processes, one per GPU, since Transformer Engine and Megatron keep state per process. If the two runs
without offload differ, the table reports the row as not reproducible. `--megatron` uses the Megatron-Core of a checkout instead
of the installed one. Rows that it does not support show the reason and are not failures.

What you should see: a line for each finished row, and a table at the end, which the script also writes to
`matrix_1gpu_0.19.2.md`. The exit code is 0 if every row that ran is equal.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_results import Line, format_table, is_failure, make_line, make_result_line, summarize
from megatron_rows import ROWS, SHORT, Row

STEPS = 2
TIMEOUT_SECONDS = 240


def main() -> int:
    """Run the rows, write the table, and return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=6, help="number of rows to run at the same time")
    parser.add_argument("--gpus", type=int, default=1, help="run the rows that need this number of GPUs")
    parser.add_argument("--only", default="", help="run the rows whose name contains one of these comma-separated words")
    parser.add_argument("--short", action="store_true", help="run a few rows, one of each kind: under four minutes on one GPU")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="folder for results and logs")
    parser.add_argument("--megatron", type=Path, metavar="CHECKOUT", help="checkout of Megatron-LM to use")
    parser.add_argument("--worker", nargs=3, metavar=("ROW", "RANK", "FOLDER"), help="for internal use")
    arguments = parser.parse_args()
    if arguments.worker:
        name, rank, folder = arguments.worker
        run_worker(next(row for row in ROWS if row.name == name), int(rank), Path(folder))
        return 0
    if arguments.megatron and not (arguments.megatron / "megatron" / "core" / "__init__.py").is_file():
        parser.error(f"--megatron {arguments.megatron} is not a checkout of Megatron-LM: it has no megatron/core.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = make_environment(arguments.megatron)
    version, devices = query_workers(environment)
    show(f"Megatron-Core {version}, {devices} GPUs")
    words = [word for word in arguments.only.split(",") if word]
    chosen = [row for row in ROWS if row.name in SHORT] if arguments.short else ROWS
    rows = [row for row in chosen if row.gpus == arguments.gpus and (not words or any(word in row.name for word in words))]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        lines = list(
            pool.map(
                lambda number, row: run_row(row, arguments.out, choose_devices(environment, row, number, devices), version),
                range(len(rows)),
                rows,
            )
        )
    table = format_table(lines, version)
    (arguments.out / f"matrix_{arguments.gpus}gpu_{version}.md").write_text(table)
    show(table)
    show(summarize(lines, version))
    return sum(map(is_failure, lines))


def make_environment(checkout: Path | None) -> dict[str, str]:
    """Return the environment of the workers, which import Megatron-Core from `checkout` if it is given."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(text for text in (str(checkout.resolve()) if checkout else None, before) if text)
    return {**os.environ, "NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1", **({"PYTHONPATH": path} if path else {})}


def query_workers(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the version of Megatron-Core that workers import, and the number of GPUs that they see."""
    code = "import megatron.core, torch; print(megatron.core.__version__, torch.cuda.device_count())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    answer = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=True)
    version, devices = answer.stdout.split()[-2:]
    return version, int(devices)


def choose_devices(environment: Mapping[str, str], row: Row, number: int, devices: int) -> dict[str, str]:
    """Return the environment for row `number` of a list; rows use the GPUs in turn."""
    if devices <= row.gpus:
        return dict(environment)
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(device) for device in range(devices)]
    first = number * row.gpus
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(names[(first + rank) % devices] for rank in range(row.gpus))}


def run_row(row: Row, out: Path, environment: Mapping[str, str], version: str) -> Line:
    """Run the processes of `row`, if this version of Megatron-Core supports it, and return its line."""
    begin = time.perf_counter()
    reason = row.find_unsupported_reason(version)
    line = run_processes(row, out, environment) if reason is None else make_line(row.name, f"unsupported: {reason}")
    show(
        f"{time.perf_counter() - begin:6.1f} s  {line['row']}: {line['equal']} ({line['attention']}, reproducible "
        f"{line['reproducible']}, offloaded tags {line['offloaded']})"
    )
    return line


def run_processes(row: Row, out: Path, environment: Mapping[str, str]) -> Line:
    """Run the processes of `row` and return its line."""
    begin = time.perf_counter()
    log = out / f"{re.sub('[^a-z0-9A-Z]+', '_', row.name)}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as stream:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", row.name]
        processes = [
            subprocess.Popen([*command, str(rank), folder], stdout=stream, stderr=subprocess.STDOUT, env=dict(environment))
            for rank in range(row.gpus)
        ]
        try:
            for process in processes:
                process.wait(timeout=max(1, TIMEOUT_SECONDS - (time.perf_counter() - begin)))
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
        found = [Path(folder) / f"{rank}.json" for rank in range(row.gpus)]
        ranks = [json.loads(path.read_text()) for path in found if path.exists()]
    text = log.read_text()
    errors = [rank["error"] for rank in ranks if rank.get("error")]
    if errors or len(ranks) < row.gpus:
        return make_line(row.name, f"failed: {errors[0] if errors else find_last_line(text)}"[:300])
    return make_result_line(row.name, ranks, expected_kernel=row.attention, log=text)


def show(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def find_last_line(text: str) -> str:
    """Return the last line of a log that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def run_worker(row: Row, rank: int, folder: Path) -> None:
    """Train `row` and write the results."""
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Megatron requires it for the op fuser; Transformer Engine has the fused kernel only for Blackwell.
    os.environ.setdefault("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    try:
        found = compare(row, rank, folder)
    except Exception as error:  # noqa: BLE001 - the table reports any error
        import traceback

        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    # Another rank may wait for this one forever.
    os._exit(0)


def compare(row: Row, rank: int, folder: Path) -> dict[str, object]:
    """Return whether the baseline is reproducible, and whether training with offload is equal to it."""
    import torch

    from fgoffload import Action, OffloadConfig, OffloadPlan, Site
    from fgoffload.trainer.arguments import parse_arguments
    from fgoffload.trainer.parallel import initialize_parallel

    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(str(folder / "store"), row.gpus)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=row.gpus)
    arguments = parse_arguments(row.flags.split(), source=row.name, world_size=row.gpus)
    initialize_parallel(arguments)
    options: dict[str, object] = {"min_offloaded_tensor_size": 64, **dict(row.options)}
    if row.plan:
        actions = {Site(chunk=row.find_chunk(layer), layer=layer, tag=tag): Action(action) for layer, tag, action in row.plan}
        path = folder / f"plan-{rank}.json"
        path.write_text(OffloadPlan(actions=actions).to_json())
        options["offload_plan"] = path
    config = OffloadConfig(offload_modules=tuple(row.tags.split()), **options)
    first, again = (train(arguments, row, None)[0] for _ in range(2))
    with_offload, tags, offloaded = train(arguments, row, config)
    differ = [name for name, digest in first[1][-1].items() if with_offload[1][-1].get(name) != digest]
    return {
        "reproducible": first == again,
        "equal": first == with_offload,
        "differ": f"{len(differ)} of {len(first[1][-1])} {differ[:2]} losses {first[0] == with_offload[0]}",
        "tags": tags,
        "offloaded": offloaded,
    }


def train(arguments, row: Row, config) -> tuple[tuple[object, list[dict[str, str]], object], tuple[str, ...], dict[str, int]]:
    """Return losses, digests and evaluations, the selected tags, and the offloaded bytes by tag."""
    import contextlib

    from fgoffload.trainer.data import TextData
    from fgoffload.trainer.trainer import Trainer

    with contextlib.closing(Trainer(arguments, TextData.load(), offload=config)) as trainer:
        results, evaluations = [], []
        for step in range(STEPS + 1):
            if step in row.evaluates_after:
                evaluations.append(trainer.evaluate())
            if step < STEPS:
                results.append(trainer.run_step())
        tags, offloaded = (), {}
        if trainer.integration is not None:
            tags = trainer.integration.selected
            offloaded = {tag: stats.d2h_bytes for tag, stats in trainer.integration.last_step.tags.items()}
    return ([r.losses for r in results], [r.gradient_digests for r in results], evaluations), tags, offloaded


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main())
