"""Starts a script in one process per rank and waits for all. Ends all of them on a failure or timeout.

As a module: `run_processes`. As a script: the process whose copies the ranks are. It imports what all of them need once, since
to import Megatron takes longer than most trainings of tests do.
"""

import contextlib
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_processes(script: str, folder: Path, *, processes: int, timeout_seconds: float, imports: Sequence[str] = ()) -> None:
    """Run `script RANK PROCESSES FOLDER` for each rank, and raise what a rank that failed said last.

    Args:
        script: A Python file.
        folder: Where the processes meet, and their logs go.
        processes: As many as there are ranks.
        timeout_seconds: Of the whole run.
        imports: Modules that are imported once for all ranks. Without any, each rank is an interpreter of its own, as a GPU
            needs it; then sets of words have another order on each rank, too.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        imports = ()  # macOS has libraries of which a copy may not be used
    with (folder / "log").open("w+") as log:
        first = subprocess.Popen(
            [sys.executable, __file__, script, str(processes), str(folder), *imports],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # so that all of them can be ended
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = first.wait(timeout_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    if code != 0:
        said = ["not done in time" if code is None else f"ended with {code}"]
        for path in sorted(folder.glob("log*")):
            said += [f"{path.name}:", *path.read_text().splitlines()[-40:]]
        raise AssertionError("\n".join(said))


def _be_ranks(script: str, processes: int, folder: Path, *, imports: Sequence[str]) -> None:
    """Run the script as each rank, until all have ended well or one has failed."""
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # a collection of a copy would write to all pages, which copies share until one of them does
    ranks = {}
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            _be_rank(script, rank, processes, folder, is_fresh=not imports)
            return
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        rank, code = ranks.pop(child), os.waitstatus_to_exitcode(status)
        if code != 0:
            sys.exit(f"rank {rank} ended with {code}")


def _be_rank(script: str, rank: int, processes: int, folder: Path, *, is_fresh: bool) -> None:
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    words = [script, str(rank), str(processes), str(folder)]
    if is_fresh:
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _be_ranks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), imports=sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)  # to take all of Megatron apart takes as long as a training
