"""One function for many things, by several processes, each a copy of this one: `fgoffload plan` uses all cores.

    >>> with share_work():
    ...     map_in_processes(str, [1, 2, 3])
    ['1', '2', '3']

What comes out is the same with any number of processes: each thing is worked on by itself, and results are in order. Where
nobody allows it, in a training for one, whose device no copy could use, all is done by this process; so it is where copies are
not to be made (`_can_copy`), and what a copy that could not be made, or that ended early, should have done.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fgoffload.errors import OffloadError

Item = TypeVar("Item")
Result = TypeVar("Result")

_allowed_processes = 1


@contextlib.contextmanager
def share_work(processes: int | None = None) -> Iterator[None]:
    """Allow copies of this process while the body runs. No device is in use, and no other thread holds a lock for long.

    Args:
        processes: How many share the work, this one with them. None takes one for each core.
    """
    global _allowed_processes
    before = _allowed_processes
    _allowed_processes = _count_cores() if processes is None else processes
    try:
        yield
    finally:
        _allowed_processes = before


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return what `function` makes of each of `items`, in order.

    Args:
        function: Runs Python alone. What it returns can be pickled, and what it changes is lost.
        items: What for. They need not be pickled: the copies have them.
    """
    work = list(items)
    count = max(1, min(_allowed_processes, len(work))) if _can_copy() else 1
    own, *others = (work[first::count] for first in range(count))
    workers: list[_Worker] = []
    try:
        for share in others:
            try:
                workers.append(_Worker(functools.partial(_map, function, share), earlier=workers))
            except OSError:  # no more processes, files or memory for now
                break
        found = [_map(function, own)]
        left = [_map(function, share) for share in others[len(workers) :]]
        # Where a worker ended without a result its share is done here, and an error is raised where somebody sees it.
        found += [worker.collect() or _map(function, share) for worker, share in zip(workers, others, strict=False)]
        found += left
    finally:
        for worker in workers:
            worker.stop()
    return [found[place % count][place // count] for place in range(len(work))]


def _can_copy() -> bool:
    """Return whether this process may have copies.

    Not on macOS, whose libraries do not stand it, nor where somebody chose another way to start processes; and a daemonic
    process, as those of a pool are, may have no children.
    """
    # The first of all is the default. To ask for the chosen one alone would choose it, and nobody could choose another one.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and sys.platform != "darwin" and not multiprocessing.current_process().daemon


def _count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _map(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]


class _Worker:
    """A copy of this process that does one thing.

    Args:
        work: What, as a function whose result can be pickled.
        earlier: Workers that were started before, and that are not stopped yet.

    Raises:
        OSError: There is no worker: the system has no more processes or files for this one.
    """

    def __init__(self, work: Callable[[], Any], *, earlier: Sequence["_Worker"] = ()) -> None:
        context = multiprocessing.get_context("fork")
        self.results, results = context.Pipe(duplex=False)
        read_here = [self.results, *(worker.results for worker in earlier)]
        self._process = context.Process(target=_work, args=(work, results, read_here), daemon=True)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads: the one that waits for Ctrl-C, and NumPy's libraries', which no copy calls.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except BaseException:
            self.results.close()
            raise
        finally:
            # While the worker's end is open here too, nobody would see that the worker is gone.
            results.close()

    def collect(self) -> Any:
        """Wait for the result, and return it; None where the worker ended without one."""
        try:
            return self.results.recv()
        except (EOFError, OSError):  # it ended before it sent anything, or in the middle of it
            return None

    def stop(self) -> None:
        """End the worker, whether it is through or not."""
        # Not by SIGTERM, which the worker ignores where this process does.
        self._process.kill()
        self._process.join()
        self.results.close()


def _work(work: Callable[[], Any], results: Connection, read_by_first: Sequence[Connection]) -> None:
    # Copies of what the first process reads from. While one is open here, no worker would see that the first is gone: whoever
    # sends a result would wait for ever.
    for connection in read_by_first:
        connection.close()
    # Ctrl-C reaches all processes of a terminal: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with share_work(processes=1):
        try:
            found = work()
        except OffloadError:
            return
    with contextlib.suppress(BrokenPipeError):
        results.send(found)
