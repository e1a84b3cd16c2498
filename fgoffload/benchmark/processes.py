"""Starts the processes of a benchmark, receives their messages, and continues without settings that fail.

A session has one process per rank and runs settings one after another. If a setting crashes, runs out of memory or stops
sending messages, the session ends. The remaining settings run in a new session, which first measures its own `baseline`.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from fgoffload.benchmark.job import Crashed, Job, Message
from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.settings import BASELINE, ProcessKind
from fgoffload.benchmark.worker import run_worker

SILENCE_SECONDS = 300.0
"""Seconds without a message after which a session ends. Loading libraries from a slow disk may take a minute."""

_JOIN_SECONDS = 60.0
"""Timeout in seconds for a process to exit after its last message. CUDA takes seconds to free its memory."""

Messages = Iterator[tuple[int, Message]]
"""Pairs of rank and message. The iterator ends when all processes have finished or one has crashed."""


@contextlib.contextmanager
def start_session(job: Job, runs: Sequence[Run], kind: ProcessKind, session: int) -> Iterator[Messages]:
    """Start the processes of one session, yield their messages, and kill the remaining processes at the end."""
    log = job.folder / f"log_{kind.value}_{session}.txt"
    # A forked process would inherit libraries that have already read their environment variables.
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    readers: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="fgoffload-") as folder:
        try:
            for rank in range(job.world_size or 1):
                options = {"kind": kind, "session": session, "rank": rank, "store": Path(folder) / "store", "log": log}
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=run_worker, args=(job, tuple(runs), writer), kwargs=options, daemon=True)
                process.start()
                writer.close()  # so that the pipe closes when the process ends
                processes.append(process)
                readers[reader] = rank
            yield _listen(processes, readers, log)
        finally:
            for process in processes:
                if readers:  # at least one process has not finished
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
            yield min(readers.values()), Crashed(f"no message for {SILENCE_SECONDS:.0f} s; see {log}")
            return
        for reader, rank in tuple(readers.items()):
            if reader not in ready:
                continue
            try:
                message: Message = reader.recv()
            except (EOFError, OSError):
                processes[rank].join(_JOIN_SECONDS)
                if processes[rank].exitcode == 0:
                    del readers[reader]
                    reader.close()
                    continue
                message = Crashed(f"rank {rank} ended with exit code {processes[rank].exitcode}; see {log}")
            yield rank, message
            if isinstance(message, Crashed):
                return


def run_sessions(
    job: Job,
    runs: Sequence[Run],
    *,
    kind: ProcessKind,
    first_session: int,
    on_message: Callable[[Message], None] = lambda message: None,
    start: Callable[..., contextlib.AbstractContextManager[Messages]] = start_session,
) -> Iterator[Outcome]:
    """Run `runs`, which start with `baseline`, in sessions of one kind of process. Yield each outcome as its run ends.

    `on_message` is called with each message from rank 0. `start` has the signature of `start_session`.
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
            # Another session would start with the same `baseline`, and crash too.
            reason = f"not measured because the baseline failed: {crash.reason}"
            for run in rest:
                yield Outcome(run=run, process=kind, session=session, failure=reason)
            return
        pending, session = _list_remaining(failed, rest, baselines=2 if job.compares_bits else 1), session + 1


def _list_remaining(failed: Run, rest: Sequence[Run], *, baselines: int) -> list[Run]:
    """Return the runs for the session after a crash: `baselines` runs of `baseline`, then `rest` without the failed setting."""
    remaining = [run for run in rest if run.setting == BASELINE or run.setting != failed.setting]
    if all(run.setting == BASELINE for run in remaining):
        return []  # no setting is left to compare with `baseline`
    while [run.setting for run in remaining[:baselines]].count(BASELINE) < baselines:
        remaining.insert(0, Run(setting=BASELINE, repeat=remaining[0].repeat))
    return remaining
