"""Entry point of a benchmark process: executes its runs and sends the results through a pipe.

Libraries read environment variables at import, so this file must not import torch before `run_worker` sets the variables.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgoffload.benchmark.job import Crashed, Job, Stepped
from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.settings import ProcessKind
from fgoffload.environment import set_environment
from fgoffload.errors import OffloadError

if TYPE_CHECKING:
    from fgoffload.benchmark.runner import Runner

_MAX_REASON_LENGTH = 300
"""Maximum number of characters of an error message in a table. The log contains the full message."""


def run_worker(job: Job, runs: Sequence[Run], connection: Connection, *, log: Path, kind: ProcessKind, **place: Any) -> None:
    """Execute `runs`, with all output in `log`, and end the process. `place` contains the other arguments of `_run_all`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process handles Ctrl-C
    redirect_output(log)
    set_environment(kind.environment)
    try:
        _run_all(job, runs, connection, kind=kind, **place)
    except BaseException as error:  # noqa: BLE001 - report any error to the parent process
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the parent may have closed the pipe
            connection.send(Crashed(_describe_error(error)))
        _end(exit_code=1)
    _end(exit_code=0)


def _describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    described = text if isinstance(error, OffloadError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return described if len(described) <= _MAX_REASON_LENGTH else f"{described[:_MAX_REASON_LENGTH]}..."


def _run_all(
    job: Job, runs: Sequence[Run], connection: Connection, *, kind: ProcessKind, session: int, rank: int, store: Path
) -> None:
    """Execute `runs` on one rank. The ranks connect through the file `store`."""
    # Imported here because these modules load torch, Megatron-Core and Transformer Engine.
    from fgoffload.benchmark.loading import load_arguments
    from fgoffload.benchmark.runner import Runner
    from fgoffload.benchmark.surroundings import find_surroundings
    from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel, join_processes, name_device

    arguments = load_arguments(job)
    if arguments.world_size > 1:
        join_processes(rank=rank, world_size=arguments.world_size, local_rank=rank, store=store)
    initialize_parallel(arguments)
    runner = Runner(job, on_step=lambda loss: connection.send(Stepped(loss)))
    if job.measures_profile and session == 0:
        runner.measure_profile()
    connection.send(find_surroundings(device=name_device()))
    for run in runs:
        connection.send(run)
        connection.send(_measure(job, runner, Outcome(run=run, process=kind, session=session)))
    with contextlib.suppress(Exception):  # all results have been sent
        destroy_parallel()


def _measure(job: Job, runner: "Runner", outcome: Outcome) -> Outcome:
    try:
        if job.compares_bits:
            return dataclasses.replace(outcome, bits=runner.record_bits(outcome.setting))
        return dataclasses.replace(outcome, measurement=runner.measure_times(outcome.run))
    except OffloadError as error:
        # With several ranks, end the session, since another rank may be waiting for this one.
        if job.world_size != 1:
            raise
        traceback.print_exc()
        return dataclasses.replace(outcome, failure=_describe_error(error))


def redirect_output(path: Path) -> None:
    """Redirect all output of this process to the file `path`, including output from C libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _end(*, exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit immediately: torch's shutdown may wait forever for another rank.
    os._exit(exit_code)
