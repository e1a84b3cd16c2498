"""Entry point of one benchmark process: executes the runs of its task and reports results through a pipe.

Nothing heavy may be imported before `run_worker` has set the environment: libraries read their switches at import.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.benchmark.job import Crashed, Finished, Stepped, Task
from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.environment import set_environment
from fgoffload.errors import OffloadError

if TYPE_CHECKING:
    from fgoffload.benchmark.runner import Runner

LONGEST_REASON = 300
"""Maximum characters of an error in a table. The log has the whole error."""


def run_worker(task: Task, connection: Connection) -> None:
    """Execute `task` and end the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that shows results handles Ctrl-C
    redirect_output(task.log)
    set_environment(task.kind.environment)
    try:
        _run_task(task, connection)
    except BaseException as error:  # noqa: BLE001 - report any error to the waiting process
        traceback.print_exc()
        _end(connection, Crashed(describe_error(error)), exit_code=1)
    _end(connection, Finished(), exit_code=0)


def describe_error(error: BaseException) -> str:
    """Return `error` as one line for a row of a table."""
    text = " ".join(str(error).split())
    described = text if isinstance(error, OffloadError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return described if len(described) <= LONGEST_REASON else f"{described[:LONGEST_REASON]}..."


def _run_task(task: Task, connection: Connection) -> None:
    # Imported here, since it loads torch, Megatron-Core and Transformer Engine.
    from fgoffload.benchmark.loading import load_arguments
    from fgoffload.benchmark.runner import Runner
    from fgoffload.benchmark.surroundings import find_surroundings
    from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel, join_processes, name_device

    job = task.job
    arguments = load_arguments(job)
    if arguments.world_size > 1:
        join_processes(rank=task.rank, world_size=arguments.world_size, local_rank=task.rank, store=task.store)
    initialize_parallel(arguments)
    runner = Runner(job, on_step=lambda loss: connection.send(Stepped(loss)))
    if job.measures_profile and task.session == 0:
        runner.measure_profile()
    connection.send(find_surroundings(device=name_device()))
    for run in task.runs:
        connection.send(run)
        connection.send(_measure(task, runner, run))
    with contextlib.suppress(Exception):  # all results are sent by now
        destroy_parallel()


def _measure(task: Task, runner: "Runner", run: Run) -> Outcome:
    outcome = Outcome(run=run, process=task.kind, session=task.session)
    try:
        if task.job.compares_bits:
            return dataclasses.replace(outcome, bits=runner.record_bits(run.setting))
        return dataclasses.replace(outcome, measurement=runner.measure_times(run))
    except OffloadError as error:
        # The process is intact after a refusal, but another rank may be waiting for it.
        if task.job.world_size != 1:
            raise
        traceback.print_exc()
        return dataclasses.replace(outcome, failure=describe_error(error))


def redirect_output(path: Path) -> None:
    """Redirect all output of this process to the log at `path`, including output of C libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _end(connection: Connection, message: Crashed | Finished, *, exit_code: int) -> None:
    with contextlib.suppress(OSError):  # the other end may be closed
        connection.send(message)
        connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once: torch's shutdown may wait forever for another rank.
    os._exit(exit_code)
