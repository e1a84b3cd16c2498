"""Starts a script in several processes, one a rank, and waits for all; ends all of them when one fails or time is up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def run_processes(script: str, folder: Path, *, processes: int, timeout_seconds: float) -> None:
    """Run `script RANK PROCESSES FOLDER` for each rank, and raise what a rank that failed said last.

    Args:
        script: A Python file.
        folder: Where the processes meet, and their logs go.
        processes: As many as there are ranks.
        timeout_seconds: Of the whole run.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(processes)]
    children = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(processes), str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )
        for rank, log in enumerate(logs)
    ]
    try:
        _wait(children, deadline=time.monotonic() + timeout_seconds)
    finally:
        for child in children:
            child.kill()
            child.wait()
        for log in logs:
            log.close()
    # Those that were killed above, since another failed, come last.
    for rank, child in sorted(enumerate(children), key=lambda item: item[1].returncode == -signal.SIGKILL):
        if child.returncode != 0:
            tail = "\n".join((folder / f"log-{rank}").read_text().splitlines()[-40:])
            raise AssertionError(f"rank {rank} ended with {child.returncode}:\n{tail}")


def _wait(children: list[subprocess.Popen[bytes]], *, deadline: float) -> None:
    """Return when all have ended, or one has failed, or the deadline has passed."""
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes) or any(code for code in codes):
            return
        time.sleep(0.05)
