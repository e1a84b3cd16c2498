"""Runs a script in one process per rank and waits for all. Ends all of them on a failure or timeout.

Tests import `run_processes`, which runs this file as a script: the process that forks for each rank. It imports the shared
modules once, since an import of Megatron takes longer than most training runs of tests.
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
    """Run `script RANK PROCESSES FOLDER` for each rank, and raise with the last lines of all logs if a rank fails.

    Args:
        script: A Python file.
        folder: The folder of the logs and the shared file store.
        processes: The number of ranks.
        timeout_seconds: The timeout of the whole run.
        imports: Modules to import once for all ranks. Without any, each rank is a separate interpreter, which GPUs require.
            Then string hashes, and so the order of sets, differ between ranks, too.
    """
    environment = dict(os.environ)
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        imports = ()  # some macOS libraries do not work after a fork
    with (folder / "log").open("w+") as log:
        first = subprocess.Popen(
            [sys.executable, __file__, script, str(processes), str(folder), *imports],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # one process group, to end all of them
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
        lines = ["not done in time" if code is None else f"ended with {code}"]
        for path in sorted(folder.glob("log*")):
            lines += [f"{path.name}:", *path.read_text().splitlines()[-40:]]
        raise AssertionError("\n".join(lines))


def _run_ranks(script: str, processes: int, folder: Path, *, imports: Sequence[str]) -> None:
    """Run the script as each rank, until all have succeeded or one has failed."""
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # so that collections in forks do not copy all shared pages
    ranks = {}
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            _run_rank(script, rank, processes, folder, is_fresh=not imports)
            return
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        rank, code = ranks.pop(child), os.waitstatus_to_exitcode(status)
        if code != 0:
            sys.exit(f"rank {rank} ended with {code}")


def _run_rank(script: str, rank: int, processes: int, folder: Path, *, is_fresh: bool) -> None:
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    words = [script, str(rank), str(processes), str(folder)]
    if is_fresh:
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _run_ranks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), imports=sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)  # a normal exit of Megatron takes as long as a training run
