"""Starts the processes of a benchmark, receives their messages, and continues without settings that fail.

A session has one process for each rank and runs settings one after another. A refused setting only loses its row. A setting
that crashes, runs out of memory or stops sending messages ends its session. The remaining settings run in the next session,
which measures `baseline` first, since times are only compared within a session.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from fgoffload.benchmark.job import Crashed, Finished, Job, Message, Task
from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.settings import BASELINE, ProcessKind
from fgoffload.benchmark.worker import run_worker

SILENCE_SECONDS = 300.0
"""Seconds without a message after which a session is ended. Building a large model from a slow disk takes a minute."""

_JOIN_SECONDS = 10.0
"""Timeout in seconds for a process to exit after its last message."""


Messages = Iterator[tuple[int, Message]]
"""Each rank and message until all processes have finished. If one is lost, the last message is `Crashed`."""


@contextlib.contextmanager
def start_session(job: Job, runs: Sequence[Run], kind: ProcessKind, session: int) -> Iterator[Messages]:
    """Start the processes of one session, and yield their messages. Leaving the context ends them, even if they are busy."""
    log = job.folder / f"log_{kind.value}_{session}.txt"
    # Spawn, since a forked process would inherit imports that have already read their environment switches.
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    readers: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="fgoffload-") as folder:
        try:
            for rank in range(job.world_size or 1):
                store = Path(folder) / "store"
                task = Task(job=job, runs=tuple(runs), kind=kind, session=session, rank=rank, store=store, log=log)
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=run_worker, args=(task, writer), daemon=True)
                process.start()
                writer.close()  # so that the pipe closes when the process ends
                processes.append(process)
                readers[reader] = rank
            yield _listen(processes, readers, log)
        finally:
            for process in processes:
                if readers:  # it has not finished
                    process.kill()
                process.join(_JOIN_SECONDS)
                process.kill()
                process.join()
                process.close()
            for reader in readers:
                reader.close()


def _listen(processes: Sequence[SpawnProcess], readers: dict[Connection, int], log: Path) -> Messages:
    while readers:
        ready = multiprocessing.connection.wait(list(readers), timeout=SILENCE_SECONDS)
        if not ready:
            yield min(readers.values()), Crashed(f"no message from it for {SILENCE_SECONDS:.0f} s")
            return
        for reader, rank in tuple(readers.items()):
            if reader not in ready:
                continue
            try:
                message: Message = reader.recv()
            except (EOFError, OSError):
                processes[rank].join(_JOIN_SECONDS)
                message = Crashed(f"rank {rank} ended with exit code {processes[rank].exitcode}; see {log}")
            yield rank, message
            if isinstance(message, Crashed):
                return
            if isinstance(message, Finished):
                del readers[reader]
                reader.close()


def run_sessions(
    job: Job,
    runs: Sequence[Run],
    *,
    kind: ProcessKind,
    first_session: int,
    on_message: Callable[[Message], None] = lambda message: None,
    start: Callable[..., contextlib.AbstractContextManager[Messages]] = start_session,
) -> Iterator[Outcome]:
    """Run `runs` in sessions of one kind, and yield the outcome of each run as it ends.

    Args:
        job: The benchmark's options.
        runs: Runs in order, `baseline` first.
        kind: Kind of the processes.
        first_session: Number of the first session; later ones count up.
        on_message: Called with each message of rank 0.
        start: Starts a session, as `start_session` does.
    """
    pending, session = list(runs), first_session
    while pending:
        ended, crash = 0, None
        with start(job, pending, kind, session) as messages:
            for rank, message in messages:
                if rank == 0:
                    on_message(message)
                if isinstance(message, Outcome) and rank == 0:
                    ended += 1
                    yield message
                if isinstance(message, Crashed):
                    crash = message
        if crash is None or ended == len(pending):
            return
        failed, *rest = pending[ended:]
        yield Outcome(run=failed, process=kind, session=session, failure=crash.reason)
        if ended == 0:
            # The first `baseline` crashed, so no other session would get further. After a later crash, it is known to run.
            for run in rest:
                reason = f"not measured, since the baseline failed: {crash.reason}"
                yield Outcome(run=run, process=kind, session=session, failure=reason)
            return
        pending, session = plan_rest(failed, rest, baselines=2 if job.compares_bits else 1), session + 1


def plan_rest(failed: Run, rest: Sequence[Run], *, baselines: int) -> list[Run]:
    """Return the runs of the session that follows the crash of `failed`: `baseline`, then the rest without that setting.

    If bits are compared, `baseline` runs twice. It must reproduce itself in each process that compares other settings.
    """
    left = [run for run in rest if run.setting == BASELINE or run.setting != failed.setting]
    if all(run.setting == BASELINE for run in left):
        return []  # without other settings, `baseline` has no use
    while [run.setting for run in left[:baselines]].count(BASELINE) < baselines:
        left.insert(0, Run(setting=BASELINE, repeat=left[0].repeat))
    return left
